// What a step of decodes needs to know of each one, and its new block into the block tables.

#include <cstdint>
#include <cstring>

// rows [5, count]: slot, position, and the slot, column and number of a block that is new. tables [slots, table_stride].
// Out: token_ids, context_lens [count]; places [count], in tokens from the pool's start; own_tables [count, width]
extern "C" void labkit_expand_decodes(const int32_t* rows, int64_t count, int32_t* tables, int64_t table_stride,
                                      const int32_t* last_tokens, int64_t block_size, int64_t width,
                                      int32_t* token_ids, int64_t* places, int32_t* context_lens,
                                      int32_t* own_tables) {
    for (int64_t i = 0; i < count; i++)
        tables[rows[2 * count + i] * table_stride + rows[3 * count + i]] = rows[4 * count + i];
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = rows[i], position = rows[count + i];
        const int32_t* table = tables + slot * table_stride;
        token_ids[i] = last_tokens[slot];
        places[i] = table[position / block_size] * block_size + position % block_size;
        context_lens[i] = static_cast<int32_t>(position + 1);
        std::memcpy(own_tables + i * width, table, width * sizeof(int32_t));
    }
}

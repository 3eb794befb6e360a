// Paged attention of one new token for each sequence, float32, on the CPU.
//
// Each pair of a sequence and a key/value head is a task of its own. The query heads that share the head (G of them) go
// through its keys and values together, so that these are read from memory once. The block table is followed block by
// block: nothing is gathered into a contiguous copy first.

#include <vector>

#include "vec.h"

namespace {

using namespace labkit;

// Scores become weights: exp(score - max) / sum.
void softmax(float* scores, int64_t n) {
    float most = scores[0];
    for (int64_t i = 1; i < n; i++) most = scores[i] > most ? scores[i] : most;
    vec total = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        vec weights = exp(load_some(scores + i, count, -INFINITY) - most);
        for (int64_t j = count; j < LANES; j++) weights[j] = 0;
        std::memcpy(scores + i, &weights, count * sizeof(float));
        total += weights;
    }
    const float scale = 1.0f / sum(total);
    for (int64_t i = 0; i < n; i++) scores[i] *= scale;
}

// out += weight * value, n elements
void accumulate(float* out, const float* value, float weight, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(out + i) + load(value + i) * weight);
    for (; i < n; i++) out[i] += value[i] * weight;
}

}  // namespace

// q [S, H, D] with sequences q_stride apart, pools [N, B, K, D], tables [S, table_width], lengths [S] (tokens that each
// one sees, itself included) -> out [S, H, D]. window: how many of the last tokens are seen, 0 for all.
extern "C" void labkit_decode_attention(const float* q, int64_t q_stride, const float* keys, const float* values,
                                        const int32_t* tables, const int32_t* lengths, float* out, int64_t sequences,
                                        int64_t heads, int64_t kv_heads, int64_t head_size, int64_t block_size,
                                        int64_t table_width, int64_t window, float scale) {
    const int64_t group = heads / kv_heads, token = kv_heads * head_size;
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < sequences * kv_heads; task++) {
        const int64_t s = task / kv_heads, head = task % kv_heads;
        const int64_t end = lengths[s], begin = window > 0 && end > window ? end - window : 0, seen = end - begin;
        const int32_t* table = tables + s * table_width;
        auto place = [&](int64_t position) {  // 64 bits: a pool may hold more than 2³¹ numbers
            return (table[position / block_size] * block_size + position % block_size) * token + head * head_size;
        };
        const float* query = q + s * q_stride + head * group * head_size;
        float* result = out + (s * heads + head * group) * head_size;

        std::vector<float> scores(group * seen);
        for (int64_t i = 0; i < seen; i++) {
            const float* key = keys + place(begin + i);
            for (int64_t g = 0; g < group; g++)
                scores[g * seen + i] = dot(query + g * head_size, key, head_size) * scale;
        }
        for (int64_t g = 0; g < group; g++) softmax(scores.data() + g * seen, seen);
        for (int64_t i = 0; i < group * head_size; i++) result[i] = 0;
        for (int64_t i = 0; i < seen; i++) {
            const float* value = values + place(begin + i);
            for (int64_t g = 0; g < group; g++)
                accumulate(result + g * head_size, value, scores[g * seen + i], head_size);
        }
    }
}

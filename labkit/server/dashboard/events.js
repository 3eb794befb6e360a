// Server-sent events, read with fetch: the browser's EventSource cannot send a key.

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.param = error?.param;
  }
}

/** fetch with the key. Throws ApiError for an answer that is an error. */
export async function call(path, key, options = {}) {
  const headers = { authorization: `Bearer ${key}`, ...(options.body ? { "content-type": "application/json" } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  let body = null;
  try {
    body = await answer.json();
  } catch {
    // not one of our errors: the status says all there is
  }
  throw new ApiError(answer.status, body?.error);
}

/** The objects of a stream, one after another; "[DONE]" ends it. Throws ApiError for an error in the stream. */
export async function* eventsOf(answer) {
  let text = "";
  for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new ApiError(answer.status, object.error);
      yield object;
    }
  }
}

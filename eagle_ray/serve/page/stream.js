// One answer as it comes: the chunks of a chat completion, or a Refusal in words.

export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const LOST = "The connection was lost before the answer was complete.";

export async function* chunksOf(request, key, signal) {
  const response = await asked("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  throw new Refusal(LOST);
}

export async function asked(path, key, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new Refusal(await words(response), response.status);
  return response;
}

async function words(response) {
  if (response.status === 401) return "This server wants an API key: give it in the settings.";
  if (response.status === 429) {
    return `The server is full. Try again in ${response.headers.get("Retry-After") ?? "a few"} s.`;
  }
  const body = await response.json().catch(() => null);
  return `${response.status}: ${body?.error?.message ?? (response.statusText || "the server did not say why")}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Refusal(LOST);
    });
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

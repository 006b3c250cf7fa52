// The chat page: sends the conversation, shows the answer as it comes, and the rows it fetched.

const $ = (id) => document.getElementById(id);
const LONGEST = 65536; // characters of a conversation whose heat maps are small enough to show
let messages = [];
let texts = []; // of all tokens of the conversation so far
let heat = null; // of the last token that has one: {token, heads: bytes [layers x tokens], layers, tokens}
let controller = null;
let model = "";
let drawing = false;

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function findModel() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.ok) {
    const entry = (await answer.json()).data[0];
    model = entry.id;
    $("plain").checked ||= !entry.has_chat_template;
  }
  $("model").textContent = model || "infinigen_jax";
}

function show(role, text = "") {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  $("messages").append(box);
  box.scrollIntoView();
  return box;
}

function request() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const settings = {
    model,
    stream: true,
    stream_options: { include_usage: true },
    heat_map: messages.reduce((sum, m) => sum + m.content.length, 0) < LONGEST,
    temperature: number("temperature"),
    top_p: number("top_p"),
    seed: number("seed"),
    max_tokens: number("max_tokens"),
  };
  if ($("plain").checked) {
    return ["v1/completions", { ...settings, prompt: messages.map((m) => m.content).join("") }];
  }
  const system = $("system").value;
  const first = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...settings, messages: [...first, ...messages] }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const text = part.slice("data: ".length);
      if (text !== "[DONE]") yield JSON.parse(text);
    }
  }
}

async function send(text) {
  const mine = messages; // "New chat" replaces them
  mine.push({ role: "user", content: text });
  show("user", text);
  const box = show("assistant");
  const started = performance.now();
  $("rates").textContent = "";
  let answer = "";
  let first = 0;
  let count = 0;
  controller = new AbortController();
  $("send").hidden = !($("stop").hidden = false);
  try {
    if (!model) await findModel();
    const [path, body] = request();
    if (!body.heat_map) {
      [texts, heat] = [[], null];
      $("share").textContent = "too long for a heat map";
      $("token").replaceChildren();
      draw();
    }
    const response = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const part of events(response)) {
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      answer += piece;
      box.textContent = answer;
      const info = part.infinigen ?? {};
      if (info.prompt) texts = info.prompt;
      if (info.token !== undefined) {
        if (info.heads) heat = { ...info, heads: Uint8Array.from(atob(info.heads), (c) => c.charCodeAt(0)) };
        texts.push(info.token);
        draw();
      }
      if (piece || info.token !== undefined) {
        first ||= performance.now();
        count += 1;
      }
      if (count > 1) rates(count, first, started, part.usage, info.fetched_fraction);
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (answer) mine.push({ role: "assistant", content: answer });
  else mine.pop(); // a message without an answer is not repeated in later requests
  $("send").hidden = !($("stop").hidden = true);
}

function rates(count, first, started, usage, fetched) {
  count = usage?.completion_tokens ?? count; // a part of a text may have several tokens
  const speed = ((count - 1) / (performance.now() - first)) * 1000;
  const parts = [`${speed.toFixed(1)} tokens/s`, `first token after ${((first - started) / 1000).toFixed(2)} s`];
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`${usage.total_tokens} tokens, ${cached} of the prompt cached`);
  if (fetched !== undefined) parts.push(`${(100 * fetched).toFixed(1)} % of the cached rows fetched`);
  $("rates").textContent = parts.join(" · ");
}

// At most one drawing per frame.
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    paint();
  });
}

function paint() {
  const text = $("text");
  while (text.childElementCount > texts.length) text.lastChild.remove();
  while (text.childElementCount < texts.length) text.append(document.createElement("span"));
  texts.forEach((word, i) => {
    if (text.children[i].textContent !== word) text.children[i].textContent = word;
  });
  if (!heat) return;
  const layers = $("layer");
  while (layers.length - 1 < heat.layers) layers.add(new Option(layers.length, layers.length - 1));
  const chosen = Number(layers.value);
  const sums = new Array(heat.tokens).fill(0);
  for (let layer = 0; layer < heat.layers; layer++) {
    if (chosen >= 0 && layer !== chosen) continue;
    for (let i = 0; i < heat.tokens; i++) sums[i] += heat.heads[layer * heat.tokens + i];
  }
  const most = sums.reduce((a, b) => Math.max(a, b), 1);
  [...text.children].forEach((span, i) => {
    const share = (sums[i] ?? 0) / most;
    span.style.background = share ? `rgba(24, 87, 184, ${0.12 + 0.6 * share})` : "";
  });
  const touched = sums.filter((sum) => sum).length;
  $("share").textContent = `${touched} of ${heat.tokens} cached tokens fetched`;
  $("token").textContent = heat.token;
}

function reset() {
  controller?.abort();
  [messages, texts, heat] = [[], [], null];
  for (const id of ["messages", "text", "share", "token", "rates"]) $(id).replaceChildren();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value;
  if (!text.trim() || !$("stop").hidden) return;
  $("input").value = "";
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => controller.abort());
$("new").addEventListener("click", reset);
$("layer").addEventListener("change", paint);
findModel();

"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs;
const state = { kind: "", layer: 0, group: 0, colour: "expert", expert: null, token: null, text: "", order: "place", shown: 20 };
const COLOURS = 8;
const numbers = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 3 });
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const byId = (id) => document.getElementById(id);

/** An element with attributes (functions are listeners) and children; text is never read as HTML. */
function element(name, attributes = {}, ...children) {
  const isSvg = ["svg", "rect", "line", "circle", "path", "text", "title", "g"].includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Text whose direction is its own; a name may break after "_" and "|". */
const isolated = (text) => element("bdi", {}, String(text).split(/(?<=[_|])/).map((part, at) => [at > 0 && element("wbr"), part]));
const SURPRISE = runs[0].kind === "translation" ? "surprise at its own output" : "surprise";

// --- what the routers chose -------------------------------------------------------------------------------------

const routersOf = (run) => runs[run].routers || [];
const routerOf = (run, kind = state.kind, layer = state.layer) =>
  routersOf(run).find((router) => router.kind === kind && router.layer === layer);
const placeOf = (router) => `${router.kind}, layer ${router.layer}`;
const hasExperts = (run) => routersOf(run).some((router) => router.experts);
const kinds = [...new Set(runs.flatMap((_, run) => routersOf(run).map((router) => router.kind)))];
const groups = () => Math.max(1, ...runs.map((_, run) => routerOf(run)?.groups || 1));
const layersOf = (kind) =>
  [...new Set(runs.flatMap((_, run) => routersOf(run).filter((router) => router.kind === kind).map((router) => router.layer)))].sort((a, b) => a - b);

/** The group of an expert; null for one that is always on. */
function groupOf(router, expert) {
  if (expert < router.shared) return null;
  return Math.floor((expert - router.shared) / ((router.experts - router.shared) / router.groups));
}

/** The slots of a token, the heaviest first: expert (null in dense attention), gate, keys as [place, weight]. */
function slotsOf(sentence, run, router, place) {
  const route = sentence[run].routes?.[routersOf(run).indexOf(router)];
  if (!route) return [];
  const count = router.experts ? router.per_token : (route.k || []).length / (sentence[run][router.on].length * 6);
  const row = router.scope === "sequences" ? 0 : place;
  const slots = [];
  for (let slot = 0; slot < count; slot++) {
    const keys = [];
    for (let key = 0; route.k && key < 3; key++) {
      const at = ((place * count + slot) * 3 + key) * 2;
      if (route.k[at + 1] > 0) keys.push([route.k[at], route.k[at + 1] / 1000]);
    }
    const expert = router.experts ? route.e[row * count + slot] : null;
    slots.push({ expert, head: slot, gate: router.experts ? route.g[row * count + slot] / 1000 : null, keys });
  }
  return slots;
}

/** The expert with the largest weight, in the chosen group; null where nothing is routed. */
function firstExpert(sentence, run, router, place, group = state.group) {
  const route = router?.experts ? sentence[run].routes?.[routersOf(run).indexOf(router)] : null;
  const start = router?.scope === "sequences" ? 0 : place * router?.per_token;
  for (let slot = 0; route && slot < router.per_token; slot++) {
    const expert = route.e[start + slot];
    const own = groupOf(router, expert);
    if (router.groups > 1 ? own === group : own !== null) return expert;
  }
  return null;
}

const isSpecial = (text) => text === "</s>" || text === "<s>";
const shownText = (text, place) => (isSpecial(text) ? (place ? "end" : "start") : text);

/** Kinds of tokens, for "what each expert takes". */
const CATEGORIES = {
  "punctuation": (text) => /^[\p{P}\p{S}]+$/u.test(text) && !isSpecial(text) && text !== "<unk>",
  "numbers": (text) => /^\p{N}+([.,]\p{N}+)*$/u.test(text),
  "starts of words": (text, glue) => /\p{L}/u.test(text) && !glue && !text.startsWith("<"),
  "other pieces": (text, glue) => /\p{L}/u.test(text) && glue && !text.startsWith("<"),
  "sentence borders": isSpecial,
};

/** Category → how often each expert was first for it, over the page. A text counts once in a sentence: each of n occurrences as 1/n. */
function takes(run, router, group) {
  const found = Object.fromEntries(Object.keys(CATEGORIES).map((name) => [name, new Map()]));
  for (const sentence of page.sentences) {
    const mine = sentence[run];
    if (!mine.routes) continue;
    const often = new Map();
    for (const text of mine[router.on]) often.set(text, (often.get(text) || 0) + 1);
    mine[router.on].forEach((text, place) => {
      const expert = firstExpert(sentence, run, router, place, group);
      const name = Object.keys(CATEGORIES).find((each) => CATEGORIES[each](text, mine[`${router.on}_glue`][place] === "1"));
      if (expert !== null && name) found[name].set(expert, (found[name].get(expert) || 0) + 1 / often.get(text));
    });
  }
  return found;
}

// --- at a glance ------------------------------------------------------------------------------------------------

function card(title, main, small, go) {
  const value = go ? element("button", { type: "button", class: "link", click: go }, element("b", {}, main)) : element("b", {}, main);
  byId("glance").querySelector("dl").append(element("div", {}, element("dt", {}, title), element("dd", {}, value, small && element("small", {}, small))));
}

function drawGlance() {
  runs.forEach((run, index) => {
    const score = run.result.scores[0];
    const size = run.result.facts.find(([name]) => name === "parameters");
    const perplexity = run.result.scores.find(([name]) => name === "Valid ppl")?.[1] ?? run.curves.ppl?.valid?.at(-1)?.[1];
    card(isolated(run.name), score ? `${score[0]} ${score[1].toFixed(2)}` : "not scored", [perplexity && score?.[0] !== "Valid ppl" && `validation perplexity ${perplexity.toFixed(2)}`, size && `${numbers.format(size[1])} parameters`].filter(Boolean).join("; "));
    if (!hasExperts(index)) return;
    const loads = run.routers.filter((router) => router.load);
    const mine = runs.filter((_, other) => hasExperts(other)).length > 1 ? ` (${run.name})` : "";
    if (loads.length) {
      const least = loads.reduce((a, b) => (b.load.evenness < a.load.evenness ? b : a));
      card(`Least even router${mine}`, placeOf(least), `entropy of its choices: ${percent(least.load.evenness)} of an even load (validation set)`, () => view(least));
      const dead = loads.filter((router) => router.load.dead_experts);
      const count = dead.reduce((sum, router) => sum + router.load.dead_experts, 0);
      card(`Dead experts${mine}`, count ? `${count}` : "none", count ? dead.map(placeOf).join("; ") : `each of ${loads.length} routers used every expert on the validation set`);
    }
    let best = null;
    for (const router of run.routers.filter((each) => each.experts && each.per_token - each.shared < each.experts - each.shared)) {
      for (let group = 0; group < router.groups; group++) {
        const counts = takes(index, router, group).punctuation;
        const all = [...counts.values()].reduce((a, b) => a + b, 0);
        for (const [expert, count] of counts) if (all >= 10 && (!best || count / all > best.share)) best = { router, expert, group, all, share: count / all };
      }
    }
    if (best) card(`Punctuation${mine}`, `expert ${best.expert} of ${placeOf(best.router)}`, `has the largest weight for ${percent(best.share)} of n = ${Math.round(best.all)} marks, more than any other expert (this page; a mark counts once in a sentence)`, () => view(best.router, best.group, best.expert));
  });
  runs.forEach((run, index) => {
    const order = `${page.score ? "score" : "bits"} ${index}`;
    const worst = ordered(page.sentences.filter((each) => each[index].number), order, (each) => each)[0]?.[index];
    if (!worst) return;
    const most = page.score ? `sentence chrF ${worst.score.toFixed(1)}, its lowest on this page` : `${SURPRISE} ${worst.mean_bits.toFixed(2)} bits per token, its most on this page`;
    card(runs.length > 1 ? ["Worst sentence, ", isolated(run.name)] : "Worst sentence", `number ${worst.number}`, most, () => {
      Object.assign(state, { order, text: "", shown: 20 });
      drawControls();
      drawList();
      byId("list").firstChild.classList.add("here");
      byId("list").firstChild.scrollIntoView();
    });
  });
  if (page.differences.length) card("What differs", `${page.differences.length} settings`, `of ${runs[1].name} and ${runs[0].name}`, () => byId("differences").scrollIntoView());
}

// --- sentences --------------------------------------------------------------------------------------------------

function choice(label, key, options) {
  const change = (event) => {
    state[key] = key === "layer" || key === "group" ? Number(event.target.value) : event.target.value;
    state.expert = state.token = null;
    settle();
    drawSentences();
    byId("controls").querySelector(`[name=${key}]`).focus();
  };
  const made = options.map(([value, text]) => element("option", { value, selected: String(value) === String(state[key]) }, text));
  return element("label", {}, label, element("select", { name: key, change }, made));
}

/** Make layer and group such that there is an attention, the last with experts if the chosen one is not there. */
function settle() {
  const routed = runs.flatMap((_, run) => routersOf(run).filter((router) => router.kind === state.kind && router.experts));
  const layers = routed.length ? routed.map((router) => router.layer) : layersOf(state.kind);
  if (!layersOf(state.kind).includes(state.layer)) state.layer = Math.max(...layers);
  if (state.group >= groups()) state.group = 0;
}

/** Sentences in an order: "score 0" is by sentence chrF of the first run, lowest first; "bits 1" by the second's surprise. */
function ordered(all, order, sentenceOf) {
  const [what, run] = order.split(" ");
  const key = { score: (mine) => mine.score ?? Infinity, bits: (mine) => -(mine.mean_bits ?? -Infinity) }[what];
  return key ? [...all].sort((a, b) => key(sentenceOf(a)[run]) - key(sentenceOf(b)[run]) || 0) : all;
}

function drawControls() {
  const parts = [choice("Attention", "kind", kinds.map((kind) => [kind, kind])), choice("Layer", "layer", layersOf(state.kind).map((layer) => [layer, layer]))];
  if (groups() > 1) parts.push(choice("Group of heads", "group", Array.from({ length: groups() }, (_, group) => [group, group + 1])));
  parts.push(choice("Colour by", "colour", [["expert", "expert"], ["bits", "surprise in bits"]]));
  const orders = [["place", "as in the text"]];
  runs.forEach((run, index) => {
    const name = runs.length > 1 ? `, ${run.name}` : "";
    if (page.score && page.sentences[0][index].number) orders.push([`score ${index}`, `lowest sentence chrF first${name}`]);
    if (page.sentences[0][index].number) orders.push([`bits ${index}`, `most surprising first${name}`]);
  });
  parts.push(choice("Order", "order", orders));
  const input = (event) => drawList(Object.assign(state, { text: event.target.value, shown: 20 }));
  parts.push(element("label", {}, "Only with this text", element("input", { type: "search", name: "text", dir: "auto", value: state.text, input })));
  byId("controls").replaceChildren(...parts);
}

/** Colour and underline of an expert: 32 experts differ. */
const lookOf = (expert) => `c${expert % COLOURS} p${(expert + Math.floor(expert / COLOURS)) % 4}`;
const swatch = (expert) => element("span", { class: `swatch ${lookOf(expert)}` }, String(expert));

function expertButton(expert, note) {
  const click = () => {
    state.expert = state.expert === expert ? null : expert;
    state.token = null;
    drawLegend();
    mark();
    drawPanel();
    byId("legend").querySelector(`[data-expert="${expert}"]`)?.focus();
  };
  return element("button", { type: "button", class: "expert", "data-expert": expert, "aria-pressed": String(state.expert === expert), click, "aria-label": `expert ${expert}${note ? `, ${note}` : ""}` }, swatch(expert), note && element("small", {}, note));
}

function drawLegend() {
  const run = runs.findIndex((_, index) => routerOf(index)?.experts);
  const router = routerOf(run < 0 ? 0 : run);
  if (run < 0) return byId("legend").replaceChildren(element("span", { class: "title" }, router ? "No router here: dense attention. Choose a token for the keys of each head." : "Nothing to choose."));
  const experts = Array.from({ length: router.experts }, (_, expert) => expert).filter((expert) => router.groups === 1 || [state.group, null].includes(groupOf(router, expert)));
  const share = (expert) => (expert < router.shared ? "always on" : router.load ? percent(router.load.load[expert - router.shared]) : "");
  byId("legend").replaceChildren(element("span", { class: "title" }, `Experts of ${placeOf(router)}${router.load ? ", each with its share of choices on the validation set" : ""}. ${runs[run].kind === "translation" ? `It routes ${router.on} tokens: others have no colour. ` : ""}Experts count from 0, layers and heads from 1.`), ...experts.map((expert) => expertButton(expert, share(expert))));
}

const RIGHT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

/** The direction of a text by its first letter. */
function direction(texts) {
  const letter = texts.filter((text) => !/^<.*>$/.test(text)).join("").match(/\p{L}/u);
  return letter && RIGHT.test(letter[0]) ? "rtl" : "ltr";
}

function tokenRow(sentence, index, run, side) {
  const mine = sentence[run];
  const router = routerOf(run);
  const routed = router?.on === side ? router : null;
  const tokens = mine[side].map((text, place) => {
    const classes = ["token"];
    let note = "";
    let label = shownText(text, place);
    const expert = state.colour === "expert" && routed ? firstExpert(sentence, run, routed, place) : null;
    const bits = state.colour === "bits" && side === "target" ? mine.bits[place] : null;
    if (expert !== null) {
      classes.push("c", lookOf(expert));
      note = String(expert);
      label += `, expert ${expert}`;
    } else if (typeof bits === "number") {
      classes.push(`s${Math.min(4, Math.floor(bits / 3) + (bits >= 1 ? 1 : 0))}`);
      note = bits.toFixed(1);
      label += `, ${note} bits`;
    }
    if (isSpecial(text)) classes.push("special");
    if (mine[`${side}_glue`][place] === "1") classes.push("glue");
    const about = { type: "button", class: classes.join(" "), tabindex: place ? -1 : 0, "data-place": place, "aria-label": label, "data-expert": expert };
    return element("button", about, shownText(text, place), note && element("sub", { "aria-hidden": "true" }, note));
  });
  const plain = !(state.colour === "expert" ? routed?.experts : side === "target");
  return element("div", { class: `tokens ${plain ? "plain" : ""}`, role: "group", dir: direction(mine[side]), "data-sentence": index, "data-run": run, "data-side": side, "aria-label": `${side}, ${runs[run].name}` }, tokens);
}
const part = (label, content) => element("div", { class: "part" }, element("span", {}, label), content);
const plainText = (text) => element("p", { class: "text", dir: "auto" }, text);

function sentenceCard(sentence, index) {
  const first = sentence.find((each) => each.number);
  const made = element("li", { id: `sentence-${first.number}` });
  const top = element("div", { class: "top" }, element("b", {}, `${first.number}`));
  made.append(top);
  const bySource = routerOf(sentence.findIndex((each) => each.routes))?.on === "source";
  sentence.forEach((mine, run) => {
    if (!mine.number) return;
    const name = runs.length > 1 ? element("bdi", {}, `${runs[run].name} `) : "";
    if (mine.score !== undefined) top.append(element("span", {}, name, "sentence chrF ", element("b", {}, mine.score.toFixed(1))));
    top.append(element("span", {}, mine.score === undefined ? name : "", `${SURPRISE} `, element("b", {}, mine.mean_bits.toFixed(2)), " bits per token"));
    const routed = routerOf(run)?.experts;
    if (mine.source && (run === 0 || (bySource && routed))) made.append(part(run ? ["source, ", isolated(runs[run].name)] : "source", tokenRow(sentence, index, run, "source")));
  });
  if (first.reference !== undefined) made.append(part("reference", plainText(first.reference)));
  sentence.forEach((mine, run) => {
    if (!mine.number) return;
    const label = runs.length > 1 ? isolated(runs[run].name) : mine.source ? "translation" : "text";
    made.append(part(label, element("div", {}, mine.text !== undefined && plainText(mine.text), tokenRow(sentence, index, run, "target"))));
    if (!mine.routes) made.append(element("p", { class: "quiet" }, "Experts of this sentence are left out for the page's size."));
  });
  return made;
}

function selected() {
  const wanted = state.text.trim().toLowerCase();
  const textOf = (mine) => [mine.text, mine.reference, ...["source", "target"].map((side) => (mine[side] || []).map((text, place) => (mine[`${side}_glue`][place] === "1" ? "" : " ") + text).join(""))].join(" ").toLowerCase();
  const found = page.sentences.map((sentence, index) => ({ sentence, index })).filter(({ sentence }) => !wanted || sentence.some((mine) => mine.number && textOf(mine).includes(wanted)));
  return ordered(found, state.order, (each) => each.sentence);
}

function drawList() {
  const found = selected();
  byId("list").replaceChildren(...found.slice(0, state.shown).map(({ sentence, index }) => sentenceCard(sentence, index)));
  byId("count").textContent = `${Math.min(state.shown, found.length)} of ${found.length} sentences${found.length < page.sentences.length ? ` with this text; ${page.sentences.length} on the page` : ""}`;
  byId("more").hidden = found.length <= state.shown;
  mark();
}

/** Show which tokens are chosen: those of an expert, or one token and its strongest keys. */
function mark(token = state.token) {
  const place = token && { ...token, slots: slotsOf(page.sentences[token.index], token.run, token.router, token.place) };
  const keys = new Map(); // place of a token → whose strongest key it is
  for (const { expert, head, keys: own } of place?.slots || []) if (own.length) keys.set(own[0][0], [...(keys.get(own[0][0]) || []), expert ?? head + 1]);
  for (const row of byId("list").querySelectorAll(".tokens")) {
    const same = place && Number(row.dataset.sentence) === place.index && Number(row.dataset.run) === place.run;
    const visible = place && runs[place.run].routers && (row.dataset.side === place.router.to);
    for (const each of row.children) {
      const number = Number(each.dataset.place);
      each.classList.toggle("dim", state.expert !== null && each.dataset.expert !== undefined && each.dataset.expert !== String(state.expert));
      each.classList.toggle("key", Boolean(same && visible && keys.has(number)));
      each.dataset.of = (keys.get(number) || []).join(", ");
      each.setAttribute("aria-pressed", String(Boolean(state.token && same && row.dataset.side === place.side && number === place.place)));
    }
  }
}

/** The token of an event: its sentence, run, side, place, and the router that is shown for it. */
function tokenAt(target) {
  const button = target.closest?.(".token");
  if (!button) return null;
  const { sentence, run, side } = button.parentElement.dataset;
  const shown = routerOf(Number(run));
  const other = routersOf(Number(run)).filter((router) => router.on === side && router.layer === state.layer)[0] || routersOf(Number(run)).filter((router) => router.on === side)[0];
  return { index: Number(sentence), run: Number(run), side, place: Number(button.dataset.place), router: shown?.on === side ? shown : other, button };
}
const chip = (text, note) => element("li", {}, isolated(text), " ", element("small", {}, note));

function drawPanel(token = state.token) {
  const panel = byId("panel");
  panel.classList.toggle("empty", !token && state.expert === null);
  const nothing = [element("p", { class: "quiet" }, "Nothing is chosen. Point at a token, or choose an expert above.")];
  panel.replaceChildren(...(token ? tokenPanel(token) : state.expert !== null ? expertPanel() : nothing));
  if (state.token || state.expert !== null) panel.prepend(element("button", { type: "button", class: "close", click: letGo, "aria-label": "Close" }, "×"));
}

/** Choose nothing; the focus goes back to the token or the expert that was chosen. */
function letGo() {
  const { token, expert } = state;
  const inside = document.activeElement.closest("#legend, #panel");
  Object.assign(state, { token: null, expert: null });
  if (expert !== null) drawLegend();
  if (inside) (token ? token.button : byId("legend").querySelector(`[data-expert="${expert}"]`))?.focus({ preventScroll: true });
  mark();
  drawPanel();
}

function tokenPanel({ index, run, side, place, router }) {
  const sentence = page.sentences[index];
  const mine = sentence[run];
  const bits = side === "target" ? mine.bits[place] : null;
  const parts = [element("h3", {}, "“", isolated(shownText(mine[side][place], place)), "”"), element("p", { class: "quiet" }, `token ${place + 1} of the ${side}, sentence ${mine.number}`, runs.length > 1 ? [", ", isolated(runs[run].name)] : "", typeof bits === "number" ? `; surprise ${bits.toFixed(2)} bits` : "")];
  if (!router) return parts;
  if (side === "target" && runs[run].kind !== "masked") parts.push(element("p", { class: "quiet" }, `These are of the step that reads this token and predicts the next one.${typeof bits === "number" ? " The surprise is of the step before, which predicted it." : ""}`));
  parts.push(element("p", { class: "quiet" }, `${router.experts ? "Experts, with their weights," : "Heads"} of ${placeOf(router)}${router.scope === "sequences" ? ", the same for the whole sentence" : ""}:`));
  const texts = router.to && mine[router.to];
  for (const slot of slotsOf(sentence, run, router, place)) {
    const group = slot.expert === null ? null : groupOf(router, slot.expert);
    if (router.groups > 1 && group !== null && group !== state.group) continue;
    const name = slot.expert === null ? element("span", {}, `head ${slot.head + 1}`) : expertButton(slot.expert, group === null ? "always on" : "");
    const weight = slot.gate === null ? [] : [element("progress", { value: slot.gate, max: 1, "aria-label": "weight" }), element("span", {}, slot.gate.toFixed(3))];
    const keys = slot.keys.map(([key, value]) => chip(key < 0 ? "earlier text" : shownText(texts[key], key), value.toFixed(3)));
    parts.push(element("div", { class: "slot" }, element("div", { class: "meter" }, name, weight), keys.length ? element("ul", { class: "chips", "aria-label": "strongest keys" }, keys) : ""));
  }
  if (texts && router.experts && router.slots === "experts") parts.push(element("p", { class: "quiet" }, "Keys are those of the heads that an expert has, on average."));
  return parts;
}

function expertPanel() {
  const run = runs.findIndex((_, index) => routerOf(index)?.experts);
  const router = routerOf(run);
  const expert = state.expert;
  const parts = [element("h3", {}, swatch(expert), ` Expert ${expert}`), element("p", { class: "quiet" }, placeOf(router), ", ", isolated(runs[run].name))];
  if (router.load && expert >= router.shared) {
    const at = expert - router.shared;
    parts.push(element("p", {}, element("b", {}, percent(router.load.load[at])), " of choices and ", element("b", {}, percent(router.load.gate_share[at])), ` of weight on the validation set (even: ${percent(1 / router.load.num_experts)})`));
  }
  const counts = new Map();
  let all = 0;
  for (const sentence of page.sentences) {
    if (!sentence[run].routes) continue;
    sentence[run][router.on].forEach((text, place) => {
      if (firstExpert(sentence, run, router, place) !== expert) return;
      all++;
      counts.set(shownText(text, place), (counts.get(shownText(text, place)) || 0) + 1);
    });
  }
  const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 20);
  parts.push(element("h3", {}, "On this page"), element("p", { class: "quiet" }, `the largest weight for ${numbers.format(all)} tokens, repetitions included; most often for:`), element("ul", { class: "chips" }, most.map(([text, count]) => chip(text, count))));
  const typical = router.typical?.[expert];
  if (typical) parts.push(element("h3", {}, "Most typical"), element("p", { class: "quiet" }, "tokens of the validation set that chose it more than by chance (PMI in nats, × choices):"), element("ul", { class: "chips" }, typical.map(([text, pmi, count]) => chip(text, `${pmi.toFixed(2)}, ${numbers.format(count)} ×`))));
  return parts;
}

function drawKinds() {
  const place = byId("kinds").querySelector("div");
  const run = runs.findIndex((_, index) => routerOf(index)?.experts);
  byId("kinds").hidden = run < 0;
  if (run < 0 || !byId("kinds").open) return;
  const router = routerOf(run);
  const found = takes(run, router, state.group);
  const totals = Object.values(found).map((counts) => [...counts.values()].reduce((a, b) => a + b, 0));
  const most = Object.values(found).map((counts) => Math.max(0, ...counts.values()));
  const experts = Array.from({ length: router.experts }, (_, expert) => expert).filter((expert) => groupOf(router, expert) !== null && (router.groups === 1 || groupOf(router, expert) === state.group));
  const rows = experts.map((expert) => element("tr", {}, element("th", { scope: "row" }, swatch(expert)), Object.values(found).map((counts, column) => {
    const count = counts.get(expert) || 0;
    return element("td", { class: `number ${count && count === most[column] ? "most" : ""}` }, totals[column] ? `${percent(count / totals[column])}${count && count === most[column] ? " ▲" : ""}` : "–");
  }), element("td", { class: "wide" }, (router.typical?.[expert] || []).slice(0, 6).map(([text], at) => [at ? " · " : "", isolated(text)]))));
  place.replaceChildren(element("p", { class: "quiet" }, `Of all tokens of a kind on this page (a text counts once in a sentence): the share for which an expert of ${placeOf(router)} has the largest weight. ▲ marks the largest. Typical tokens are of the validation set.`), element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ["Expert", ...Object.keys(found).map((name, at) => `${name} (n = ${Math.round(totals[at])})`), "Most typical"].map((head, at) => element("th", { scope: "col", class: at && at < 6 ? "number" : "" }, head)))), element("tbody", {}, rows))));
}

function drawSentences() {
  drawControls();
  drawLegend();
  drawList();
  drawPanel();
  drawKinds();
}

/** Show a router, and perhaps one of its experts. */
function view(router, group = 0, expert = null) {
  Object.assign(state, { kind: router.kind, layer: router.layer, group, expert, token: null, colour: "expert" });
  drawSentences();
  byId("sentences").scrollIntoView();
}

function listen() {
  const list = byId("list");
  const preview = (event) => {
    const token = tokenAt(event.target);
    mark(token || state.token);
    drawPanel(token || state.token);
  };
  const pin = (token) => {
    Object.assign(state, { token, expert: null });
    drawLegend();
    mark();
    drawPanel();
    const below = token.button.getBoundingClientRect().bottom + 16 - byId("panel").getBoundingClientRect().top;
    if (below > 0 && matchMedia("(max-width: 60rem)").matches) scrollBy(0, below); // the panel is a sheet at the bottom
  };
  list.addEventListener("pointerover", (event) => event.pointerType === "mouse" && preview(event));
  list.addEventListener("pointerleave", () => preview({ target: list }));
  list.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && preview(event)); // not of a tap
  list.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    if (!token) return;
    const isChosen = state.token && ["index", "run", "side", "place"].every((key) => token[key] === state.token[key]);
    isChosen ? letGo() : pin(token);
  });
  list.addEventListener("keydown", (event) => {
    const token = event.target.closest(".token");
    if (!token) return;
    const forward = token.parentElement.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
    const steps = { [forward]: 1, [forward === "ArrowLeft" ? "ArrowRight" : "ArrowLeft"]: -1 };
    const row = [...token.parentElement.children];
    const rows = [...list.querySelectorAll(".tokens")];
    const vertical = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = event.key === "Home" ? row[0] : event.key === "End" ? row[row.length - 1] : vertical ? rows[rows.indexOf(token.parentElement) + vertical]?.children[0] : row[row.indexOf(token) + steps[event.key]];
    if (!next) return;
    event.preventDefault();
    for (const each of next.parentElement.children) each.tabIndex = each === next ? 0 : -1; // one stop for Tab in a row
    next.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") letGo();
  });
  byId("more").addEventListener("click", () => drawList(Object.assign(state, { shown: state.shown + 20 })));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("kinds").addEventListener("toggle", drawKinds);
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${byId("legend").offsetHeight + 8}px`)).observe(byId("legend"));
  addEventListener("beforeprint", () => drawPanel());
}

// --- loads ------------------------------------------------------------------------------------------------------

/** Bars: each expert's share of choices; dots: of weights; dashed: the even share; `top` is the share at full height. */
function loadBars({ load, gate_share: gates, num_experts: count }, top) {
  const wide = Math.max(4, Math.min(18, 360 / count));
  const y = (share) => 46 - (44 * share) / top;
  const text = load.map((share, expert) => `expert ${expert} ${percent(share)}`).join(", ");
  return element("svg", { viewBox: `0 0 ${wide * count} 48`, width: wide * count, height: 48, role: "img", "aria-label": text },
    load.map((share, expert) => element("rect", { class: `bar ${share ? "" : "dead"}`, x: expert * wide + 1, y: share ? y(share) : 44, width: Math.max(1, wide - 2), height: share ? 46 - y(share) : 2 }, element("title", {}, `expert ${expert}: ${percent(share)} of choices, ${percent(gates[expert])} of weight`))),
    gates.map((share, expert) => element("circle", { class: "dot", cx: (expert + 0.5) * wide, cy: y(share), r: 1.8 })),
    element("line", { class: "rule", x1: 0, x2: wide * count, y1: y(1 / count), y2: y(1 / count) }));
}

function drawLoads() {
  const place = byId("loads").querySelector("div");
  place.append(element("p", { class: "help" }, "Measured on the validation set, as by moa-fairseq analyze expert-load. Bars are each expert's share of choices, dots its share of weight, the dashed line an even share; all rows have one scale. Evenness is the entropy of the choices, as a fraction of an even load's; token entropy is that of one token's probabilities, on average and in nats: a router that is surer has less."));
  const top = Math.max(0, ...runs.flatMap((_, index) => routersOf(index).flatMap(({ load }) => (load ? [...load.load, ...load.gate_share] : [])))) || 1;
  runs.forEach((run, index) => {
    if (runs.length > 1) place.append(element("h3", {}, isolated(run.name)));
    const loads = routersOf(index).filter((router) => router.load);
    if (!loads.length) return place.append(element("p", {}, hasExperts(index) ? "Loads were not measured." : "This run has no router: its attention is dense."));
    const least = Math.min(...loads.map((router) => router.load.evenness));
    const rows = [...loads].sort((a, b) => kinds.indexOf(a.kind) - kinds.indexOf(b.kind) || a.layer - b.layer).map((router) => element("tr", {},
      element("th", { scope: "row" }, element("button", { type: "button", class: "link", click: () => view(router) }, placeOf(router)), router.load.evenness === least && element("span", { class: "badge" }, "least even choices")),
      element("td", {}, loadBars(router.load, top)),
      [percent(router.load.evenness), percent(router.load.max_load), percent(router.load.min_load), percent(Math.max(...router.load.gate_share))].map((text) => element("td", { class: "number" }, text)),
      element("td", { class: "number" }, router.load.dead_experts || "none"),
      element("td", { class: "number" }, `${router.load.experts_per_token} of ${router.load.num_experts}${router.shared ? ` + ${router.shared}` : ""}`),
      element("td", { class: "number" }, router.token_entropy.toFixed(3))));
    const heads = ["Router", "Load of experts 0, 1, …", "Evenness of choices", "Most chosen", "Least chosen", "Largest share of weight", "Dead", "K of E", "Token entropy"];
    place.append(element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, heads.map((head, at) => element("th", { scope: "col", class: at > 1 ? "number" : "" }, head)))), element("tbody", {}, rows))));
  });
}

// --- training ---------------------------------------------------------------------------------------------------

const METRICS = { loss: "loss (bits per token)", nll_loss: "negative log-likelihood (bits per token)", ppl: "perplexity (logarithmic)", lr: "learning rate", load_entropy: "entropy of the load (nats, mean of routers)", dead_experts: "experts without a token in a batch" };

/** Round numbers between two values: multiples of 1, 2 or 5 times a power of ten; of a logarithmic axis these numbers themselves. */
function ticks(low, high, log) {
  const round = Array.from({ length: 90 }, (_, at) => [1, 2, 5][at % 3] * 10 ** (Math.floor(at / 3) - 12));
  const inside = round.filter((value) => log && value >= low && value <= high);
  if (inside.length > 1) return inside.filter((value) => inside.length < 8 || String(value).startsWith("1"));
  const step = round.find((value) => (high - low) / value <= 5) || high - low;
  return Array.from({ length: 6 }, (_, at) => (Math.ceil(low / step) + at) * step).filter((value) => value <= high);
}

function chart(metric) {
  const lines = runs.flatMap((run, index) => ["train", "valid"].map((part) => ({ run: index, part, points: (run.curves[metric]?.[part] || []).filter(([, value]) => value !== null) }))).filter(({ points }) => points.length);
  if (!lines.length) return null;
  const validated = lines.some(({ part }) => part === "valid");
  const log = metric === "ppl";
  const scale = (value) => (log ? Math.log(Math.max(value, 1e-9)) : value);
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value));
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  const end = Math.max(1, ...lines.flatMap(({ points }) => points.map(([update]) => update)));
  const x = (update) => 46 + (300 * update) / end;
  const y = (value) => 150 - (138 * (scale(value) - scale(low))) / (scale(high) - scale(low));
  const short = (value) => value.toLocaleString("en-GB", { maximumSignificantDigits: 4 });
  const drawn = lines.map(({ run, part, points }) => [
    element("path", { class: `curve run${run} ${part === "train" && validated ? "train" : ""}`, d: points.map(([update, value], at) => `${at ? "L" : "M"}${x(update).toFixed(1)} ${y(value).toFixed(1)}`).join("") }, element("title", {}, `${runs[run].name}, ${part === "train" ? "training" : "validation"}`)),
    part === "valid" && points.length <= 40 ? points.map(([update, value]) => element("circle", { class: `mark run${run}`, cx: x(update), cy: y(value), r: 2.6 }, element("title", {}, `${runs[run].name}: ${numbers.format(value)} after ${numbers.format(update)} updates`))) : []]);
  const last = lines.map(({ run, part, points }) => `${runs[run].name}, ${part === "train" ? "training" : "validation"}: ${numbers.format(points[points.length - 1][1])} after ${numbers.format(points[points.length - 1][0])} updates`);
  return element("figure", {}, element("figcaption", {}, METRICS[metric]), element("svg", { viewBox: "0 0 356 178", role: "img", "aria-label": `${METRICS[metric]}; ${last.join("; ")}` },
    ticks(low, high, log).map((value) => [element("line", { class: "axis", x1: 46, x2: 346, y1: y(value), y2: y(value) }), element("text", { x: 41, y: y(value) + 4, "text-anchor": "end" }, short(value))]),
    ticks(0, end, false).map((update) => element("text", { x: x(update), y: 168, "text-anchor": "middle" }, short(update))), drawn));
}

function drawTraining() {
  const place = byId("training").querySelector("div");
  const charts = Object.keys(METRICS).map(chart).filter(Boolean);
  if (!charts.length) return place.append(element("p", {}, "There is no log of the training here."));
  const names = runs.map((run, index) => element("span", {}, element("i", { class: `line run${index}`, "aria-hidden": "true" }), isolated(run.name), "  "));
  place.append(element("p", { class: "help" }, names, "Against updates. Thin: training; thick: validation."), element("div", { class: "charts" }, charts));
  const valid = runs.flatMap((run) => (run.curves.ppl?.valid || []).map(([update, value]) => [run.name, update, value]));
  if (valid.length) place.append(element("details", {}, element("summary", {}, "Validation perplexity as numbers"), table(["Run", "Updates", "Perplexity"], valid)));
}

// --- result -----------------------------------------------------------------------------------------------------

function cell(value, isNumber) {
  const text = typeof value === "number" ? numbers.format(value) : value === undefined || value === null ? "–" : isolated(value);
  return element("td", { class: isNumber ? "number" : "wide" }, text);
}

function table(heads, rows) {
  const numeric = heads.map((_, at) => at > 0 && rows.every((row) => typeof row[at] === "number"));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, heads.map((head, at) => element("th", { scope: "col", class: numeric[at] ? "number" : "" }, isolated(head))))), element("tbody", {}, rows.map((row) => element("tr", {}, element("th", { scope: "row" }, isolated(row[0])), row.slice(1).map((value, at) => cell(value, numeric[at + 1])))))));
}

/** One row for each label, one column for each run. */
function joined(part) {
  const labels = [...new Set(runs.flatMap((run) => run.result[part].map(([label]) => label)))];
  return labels.map((label) => [label, ...runs.map((run) => run.result[part].find(([each]) => each === label)?.[1])]);
}

function drawResult() {
  const place = byId("result").querySelector("div");
  const heads = ["", ...runs.map((run) => run.name)];
  const scores = joined("scores");
  if (page.differences.length) place.append(element("h3", { id: "differences" }, "What differs: ", isolated(runs[1].name), " → ", isolated(runs[0].name)), table(["Setting", `${runs[1].name} → ${runs[0].name}`], page.differences));
  place.append(element("h3", {}, "Scores of the whole test set"), scores.length ? table(heads, scores) : element("p", {}, "Not scored."));
  runs.forEach((run) => {
    const { paper, differences } = run.result;
    if (paper.length) place.append(element("h3", {}, "The paper's row, ", isolated(run.name)), table(["Where", "Model", "Measure", "Paper", "Here", "Difference"], paper.map((row) => [row.where, row.model, row.measure, row.paper, row.ours, row.difference])));
    if (differences.length) place.append(element("h3", {}, "What differs from the paper's experiment, ", isolated(run.name)), element("ul", {}, differences.map((text) => element("li", {}, isolated(text)))));
  });
  const facts = joined("facts");
  const hardware = new Set(facts.find(([label]) => label === "hardware")?.slice(1));
  place.append(element("h3", {}, "Costs and origin"), table(heads, facts));
  if (hardware.size > 1) place.append(element("p", { class: "note" }, "The hardware of the runs differs: their seconds and tokens per second cannot be compared."));
}

const routed = runs.findIndex((_, run) => hasExperts(run));
if (kinds.length) {
  state.kind = (routersOf(Math.max(0, routed)).find((router) => router.experts) || routersOf(Math.max(0, routed))[0] || { kind: kinds[0] }).kind;
  settle();
}
drawGlance();
if (page.sentences.length) drawSentences();
else byId("sentences").hidden = true;
listen();
drawLoads();
drawTraining();
drawResult();

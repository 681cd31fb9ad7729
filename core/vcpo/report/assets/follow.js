// Keeps a served page up to date: asks its server, and takes over what changed without a reload.

const FOLLOW_MS = 2000;
let seen = null;
let waiting = 0;

const tell = (words, isLive) => {
  const live = document.querySelector(".live");
  if (!live) return;
  live.textContent = words;
  live.dataset.live = String(isLive);
};

const takeOver = (text) => {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const now = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    if (now && now.textContent !== part.textContent) part.replaceWith(document.adoptNode(now));
  }
  load(JSON.parse(fresh.getElementById("data").textContent));
};

const follow = async () => {
  clearTimeout(waiting);
  try {
    const headers = seen ? { "If-None-Match": seen } : {};
    const answer = await fetch(location.href, { cache: "no-store", headers });
    if (answer.status === 200) {
      takeOver(await answer.text());
      seen = answer.headers.get("ETag");
    }
    tell(answer.ok || answer.status === 304 ? "live" : `not live: the server says ${answer.status}`, answer.status < 400);
  } catch {
    tell("not live: vcpo report --follow has ended", false);
  }
  waiting = setTimeout(follow, FOLLOW_MS);
};
document.addEventListener("visibilitychange", follow);
follow();

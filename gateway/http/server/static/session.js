// Who has signed in with this browser: a cookie that no script reads, and a token that the requests
// which change something carry beside it.
let session = { is_signed_in: false, providers: [] };

async function readSession() {
  try {
    const response = await ask("/auth/session");
    if (response.ok) session = await response.json();
  } catch { /* then nobody has */ }
  const landing = encodeURIComponent(location.pathname);
  byId("providers").replaceChildren(...session.providers.map((name) =>
    element("a", { href: `/auth/login?issuer=${name}&next=${landing}` }, `Sign in with ${name}`)));
  byId("providers").hidden = !session.providers.length;
}

async function signOut() {
  await ask("/auth/logout", { method: "POST" });
  session = { ...session, is_signed_in: false, csrf_token: null };
}

// ---- the same request elsewhere --------------------------------------------------------------

// A JSON value as Python writes it.
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}: ${python(inner)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

function codeOf({ body, arm }, language) {
  const { stream, stream_options: _, outrider, ...rest } = body;
  const options = Object.keys(outrider).length ? outrider : null;
  if (language === "curl") {
    const quoted = JSON.stringify({ ...rest, ...(options && { outrider: options }) }).replaceAll("'", "'\\''");
    return [`curl ${location.origin}/v1/chat/completions -H 'content-type: application/json'`,
      ...(key ? [`-H "authorization: Bearer $OUTRIDER_KEY"`] : []),
      ...(arm ? [`-H 'x-outrider-arm: ${arm.replaceAll("'", "'\\''")}'`] : []), `-d '${quoted}'`].join(" \\\n  ");
  }
  const fields = Object.entries(rest).map(([name, value]) => `    ${name}=${python(value)},`);
  if (options) fields.push(`    extra_body=${python({ outrider: options })},`);
  if (arm) fields.push(`    extra_headers=${python({ "x-outrider-arm": arm })},`);
  return [...(key ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key ? 'os.environ["OUTRIDER_KEY"]' : '"none"'})`,
    "chat = client.chat.completions.create(", ...fields, ")", "print(chat.choices[0].message.content)", ""].join("\n");
}

async function copy(button, text) {
  const was = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = was; }, 1500);
  } catch {  // without encryption browsers let no page write to the clipboard
    byId("copied").querySelector("pre").textContent = text;
    byId("copied").showModal();
  }
}

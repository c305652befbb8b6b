// Vercel AI SDK: generateText, streamText, a tool, an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: `${process.env.OUTRIDER_URL}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider("auto");
const getWeather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === "Oslo" ? "7 degrees" : "unknown"),
});

const chat = await generateText({ model, prompt: "Hello" });
let streamed = "";
for await (const part of streamText({ model, prompt: "Hello" }).textStream) streamed += part;
const told = await generateText({
  model,
  prompt: "Weather in Oslo?",
  tools: { get_weather: getWeather },
  stopWhen: stepCountIs(3),
});
const typed = await generateText({
  model,
  prompt: "Hello",
  output: Output.object({ schema: z.object({ city: z.string() }) }),
});
console.log(
  JSON.stringify({ chat: chat.text, stream: streamed, tool: told.text, object: typed.output }),
);

// Prints the schemas that zod 4 and the SDKs for Node.js send, as JSON.
//
//     node zod_forms.mjs > zod.json
//
// It needs zod, ai, openai and @anthropic-ai/sdk, in a folder of their own beside a copy of this file.

import { readFileSync } from "node:fs";
import { asSchema, jsonSchema } from "ai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import * as z from "zod";

const address = z.object({ street: z.string(), city: z.string().describe("A city."), postcode: z.string().nullable() });
const cat = z.object({ kind: z.literal("cat"), lives: z.number().int() });
const dog = z.object({ kind: z.literal("dog"), name: z.string() });
const pet = z.discriminatedUnion("kind", [cat, dog]);
const node = z.object({ value: z.number(), get children() { return z.array(node); } });
const category = z.object({ name: z.string(), get parent() { return category.nullable(); } });
const o = (shape) => z.object(shape);

const schemas = {
  scalars: o({ a: z.string(), b: z.number(), c: z.boolean(), d: z.null(), e: z.int() }),
  optional: o({ a: z.string().optional(), b: z.number().nullable(), c: z.string().nullish() }),
  defaults: o({ a: z.string().default("x"), b: z.array(z.number()).default([]), c: z.number().prefault(1) }),
  "enum": o({ a: z.enum(["red", "green"]), b: z.enum({ low: 1, high: 2 }), c: z.literal(["x", 1, null]) }),
  nested: o({ home: address, others: z.array(address) }),
  described: o({ home: address.describe("Where."), a: z.string().meta({ title: "A", examples: ["x"], unit: "m" }) }),
  recursive: node,
  "recursive nullable": category,
  lazy: o({ a: z.lazy(() => node) }),
  union: o({ a: z.union([z.string(), z.number(), z.array(z.string())]), b: z.union([cat, address]) }),
  discriminated: o({ pet, pets: z.array(pet) }),
  "discriminated root": pet,
  xor: o({ a: z.xor([z.string(), z.number()]) }),
  intersection: o({ a: z.intersection(o({ x: z.string() }), o({ y: z.number() })) }),
  extend: cat.extend({ more: z.string() }),
  partial: address.partial(),
  record: o({ a: z.record(z.string(), z.number()), b: z.record(z.string(), address) }),
  "record of enum": o({ a: z.record(z.enum(["x", "y"]), z.number()) }),
  "record of enum, partial": o({ a: z.partialRecord(z.enum(["x", "y"]), address) }),
  "record of pattern": o({ a: z.record(z.string().regex(/^[a-z]+$/), z.number()) }),
  "record of length": o({ a: z.record(z.string().min(2), z.number()) }),
  "record of uuid": o({ a: z.record(z.uuid(), z.number()) }),
  "record of number": o({ a: z.record(z.number(), z.string()) }),
  "record of any": o({ a: z.record(z.string(), z.any()), b: z.record(z.string(), z.unknown()) }),
  "loose record": o({ a: z.looseRecord(z.string().regex(/^x-/), z.number()) }),
  strict: z.strictObject({ a: z.string() }),
  loose: z.looseObject({ a: z.string() }),
  catchall: o({ a: z.string() }).catchall(z.number()),
  empty: o({}),
  tuple: o({ a: z.tuple([z.string(), z.number()]), b: z.tuple([z.string()], z.number()) }),
  arrays: o({ a: z.array(z.string()).min(1).max(3), b: z.array(z.number()).length(2), c: z.array(z.any()).nonempty() }),
  lengths: o({ a: z.string().min(1).max(9), b: z.string().length(4), c: z.string().nonempty() }),
  numbers: o({ a: z.number().min(0).max(10), b: z.number().gt(0).lt(1), c: z.int().positive(), d: z.number().multipleOf(5) }),
  integers: o({ a: z.int32(), b: z.uint32(), c: z.float32(), d: z.number().step(0.25), e: z.number().nonnegative() }),
  regex: o({ a: z.string().regex(/^[A-Z]{2}\d+$/), b: z.string().regex(/a|b/i) }),
  "regex look-ahead": o({ a: z.string().regex(/^(?=.*\d).{8,}$/) }),
  "regex twice": o({ a: z.string().regex(/^a/).regex(/b$/) }),
  affixes: o({ a: z.string().startsWith("a-"), b: z.string().endsWith(".b"), c: z.string().includes("c.") }),
  cases: o({ a: z.string().lowercase(), b: z.string().uppercase() }),
  email: o({ a: z.email(), b: z.string().email() }),
  "email html5": o({ a: z.email({ pattern: z.regexes.html5Email }) }),
  url: o({ a: z.url(), b: z.httpUrl() }),
  uuid: o({ a: z.uuid(), b: z.uuidv4(), c: z.guid() }),
  identifiers: o({ a: z.cuid(), b: z.cuid2(), c: z.ulid(), d: z.nanoid(), e: z.ksuid(), f: z.xid() }),
  base64: o({ a: z.base64(), b: z.base64url(), c: z.hex() }),
  jwt: o({ a: z.jwt() }),
  ip: o({ a: z.ipv4(), b: z.ipv6(), c: z.cidrv4(), d: z.cidrv6() }),
  hostname: o({ a: z.hostname() }),
  e164: o({ a: z.e164() }),
  emoji: o({ a: z.emoji() }),
  "iso date": o({ a: z.iso.date() }),
  "iso datetime": o({ a: z.iso.datetime(), b: z.iso.datetime({ offset: true }), c: z.iso.datetime({ local: true }) }),
  "iso time": o({ a: z.iso.time() }),
  "iso duration": o({ a: z.iso.duration() }),
  never: o({ a: z.string(), b: z.never().optional() }),
  "any": o({ a: z.any(), b: z.unknown() }),
  "template literal": o({ a: z.templateLiteral(["v", z.number(), "-", z.enum(["x", "y"])]) }),
  readonly: o({ a: z.array(z.string()).readonly(), b: z.string().brand("id") }),
  refine: o({ a: z.string().refine((one) => one.length > 1), b: z.array(z.number()).superRefine(() => {}) }),
  pipe: o({ a: z.string().pipe(z.email()), b: z.stringbool(), c: z.coerce.number() }),
  "strange names": o({ "some name/slash~ä": z.string(), "$ref": z.number(), "type": z.boolean() }),
  json: o({ a: z.json() }),
  file: o({ a: z.string().trim().toLowerCase(), b: z.number().catch(1) }),
};

const found = [];
const add = (source, name, make, more = {}) => {
  let schema;
  try {
    schema = make();
  } catch (error) {
    process.stderr.write(`${source} ${name}: ${error.message}\n`); // a form that the library does not write
    return;
  }
  found.push({ source, name, schema, ...more });
};
for (const [name, schema] of Object.entries(schemas)) add("zod", name, () => z.toJSONSchema(schema));
for (const name of ["nested", "defaults", "recursive", "discriminated", "tuple"]) {
  add("zod", `${name}, draft 7`, () => z.toJSONSchema(schemas[name], { target: "draft-7" }));
  add("zod", `${name}, draft 4`, () => z.toJSONSchema(schemas[name], { target: "draft-4" }));
  add("zod", `${name}, OpenAPI`, () => z.toJSONSchema(schemas[name], { target: "openapi-3.0" }));
  add("zod", `${name}, input`, () => z.toJSONSchema(schemas[name], { io: "input", reused: "ref" }));
}
const flat = ["scalars", "enum", "nested", "recursive", "discriminated", "union", "email", "iso datetime", "arrays", "numbers"];
for (const name of [...flat, "record", "optional", "tuple"]) {
  const schema = schemas[name];
  add("openai", name, () => zodResponseFormat(schema, "s").json_schema.schema, { strict: true });
  add("ai", name, () => asSchema(schema).jsonSchema);
  add("anthropic", name, () => zodOutputFormat(schema).schema);
}
add("openai", "text format", () => zodTextFormat(schemas.nested, "s").schema, { strict: true });
add("openai", "function", () => zodFunction({ name: "f", parameters: schemas.enum }).function.parameters, { strict: true });
add("openai", "flat function", () => zodResponsesFunction({ name: "f", parameters: schemas.enum }).parameters, { strict: true });
add("anthropic", "tool", () => betaZodTool({ name: "f", description: "d", inputSchema: schemas.nested, run: () => "" }).input_schema);
add("ai", "array output", () => ({
  $schema: "http://json-schema.org/draft-07/schema#",
  type: "object",
  properties: { elements: { type: "array", items: asSchema(schemas.discriminated).jsonSchema } },
  required: ["elements"],
  additionalProperties: false,
}));
add("ai", "json schema", () => jsonSchema({ type: "object", properties: { a: { type: "string" } } }).jsonSchema);

const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const versions = Object.fromEntries(["zod", "ai", "openai", "@anthropic-ai/sdk"].map((name) => [name, version(name)]));
const lines = found.map((form) => "\n" + JSON.stringify(form));
console.log(`{"versions": ${JSON.stringify(versions)}, "forms": [${lines.join(",")}]}`);

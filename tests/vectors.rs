//! Every dialect answers its vectors: one request and its exact answer a line, asked in file order.
//!
//! The files under `vectors/` are data any implementation can be held against. The first line of each names
//! patches (JSON merge patch, RFC 7396) to `record.yaml`; each further line is a request to the VM whose
//! record is patched with `rec`. Vectors of the EC2 tree join with that dialect.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use metadata_user::dialect;
use metadata_user::http::{Headers, Method, Request, Response, Status, Target};
use metadata_user::record::Record;
use metadata_user::store::{Interner, Responses};
use serde::Deserialize;
use serde_json::Value;

const RECORD: &str = include_str!("vectors/record.yaml");

#[test]
fn nocloud_answers_its_vectors() {
    run("nocloud.jsonl", include_str!("vectors/nocloud.jsonl"), 28);
}

#[test]
fn kubevirt_answers_its_vectors() {
    run("kubevirt.jsonl", include_str!("vectors/kubevirt.jsonl"), 13);
}

/// One line of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    /// Name.
    n: String,
    /// Method and request target.
    q: String,
    /// Request header fields.
    #[serde(default)]
    h: BTreeMap<String, String>,
    /// Name of the patch.
    rec: Option<String>,
    /// Status.
    s: u16,
    /// `Content-Type`; not there when the field must be absent.
    t: Option<String>,
    /// Response header fields; `null` for one that must be absent.
    #[serde(default)]
    rh: BTreeMap<String, Option<String>>,
    /// Body as text.
    o: Option<String>,
    /// Body in base64.
    b64: Option<String>,
    /// What the body is as JSON.
    j: Option<Value>,
    /// What the body is as YAML.
    y: Option<Value>,
}

#[derive(Deserialize)]
struct Patches {
    patches: HashMap<String, Value>,
}

/// What came back.
struct Answer {
    status: u16,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Whatever answers requests to the VM with this record.
trait Executor {
    fn ask(&mut self, record: &Record, vector: &Vector) -> anyhow::Result<Answer>;
}

/// Asks rendered responses directly.
#[derive(Default)]
struct Rendered {
    interner: Interner,
}

impl Executor for Rendered {
    fn ask(&mut self, record: &Record, vector: &Vector) -> anyhow::Result<Answer> {
        let responses: Arc<Responses> = Arc::new(dialect::render(record, &mut self.interner));
        let (method, target) = vector.q.split_once(' ').context("q is method and target")?;
        let method = match method {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            "DELETE" => Method::Delete,
            other => bail!("a method {other} is not known"),
        };
        let response = match normalised(target) {
            None => Response::error(Status(400), &[]),
            Some((path, query)) => {
                let fields: Vec<_> = vector
                    .h
                    .iter()
                    .map(|(name, value)| httparse::Header { name, value: value.as_bytes() })
                    .collect();
                let target = Target { path: &path, query };
                responses.answer(&Request { method, target, headers: Headers::new(&fields), body: b"" })
            }
        };
        let head = std::str::from_utf8(response.head())?;
        let fields = head.lines().skip(1).filter_map(|line| line.split_once(": "));
        Ok(Answer {
            status: response.status().0,
            fields: fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            body: if method == Method::Head { Vec::new() } else { response.body().to_vec() },
        })
    }
}

/// A target as the parser hands it on: segments without empty ones, escapes decoded; `None` for 400.
fn normalised(target: &str) -> Option<(String, &str)> {
    let origin = target.strip_prefix("http://").map_or(target, |rest| &rest[rest.find('/').unwrap_or(0)..]);
    let (path, query) = origin.split_once('?').unwrap_or((origin, ""));
    let mut normal = String::new();
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        let mut octets = Vec::new();
        let mut rest = segment.bytes();
        while let Some(octet) = rest.next() {
            octets.push(match octet {
                b'%' => {
                    let digits = [rest.next()?, rest.next()?];
                    u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
                }
                other => other,
            });
        }
        let decoded = String::from_utf8(octets).ok()?;
        if matches!(decoded.as_str(), "." | "..") || decoded.contains(['/', '\0']) {
            return None;
        }
        normal.push('/');
        normal.push_str(&decoded);
    }
    Some((if normal.is_empty() { "/".into() } else { normal }, query))
}

fn run(name: &str, lines: &str, expected: usize) {
    let mut failures = Vec::new();
    let asked = ask_all(lines, &mut Rendered::default(), &mut failures).expect(name);
    assert_eq!(asked, expected, "{name} has another number of vectors");
    assert!(
        failures.is_empty(),
        "{} of {asked} vectors of {name} fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// Asks every vector and collects the failures; returns how many were asked.
fn ask_all(lines: &str, executor: &mut dyn Executor, failures: &mut Vec<String>) -> anyhow::Result<usize> {
    let mut lines = lines.lines();
    let first: Patches = serde_json::from_str(lines.next().context("an empty file")?)?;
    let mut asked = 0;
    for line in lines {
        let vector: Vector = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let patch = match &vector.rec {
            Some(rec) => first.patches.get(rec).with_context(|| format!("no patch {rec}"))?,
            None => &Value::Null,
        };
        let answer = executor.ask(&record(patch)?, &vector)?;
        if let Err(error) = check(&vector, &answer) {
            failures.push(format!("{}: {error:#}", vector.n));
        }
        asked += 1;
    }
    Ok(asked)
}

fn record(patch: &Value) -> anyhow::Result<Record> {
    let mut value: Value = serde_yaml::from_str(RECORD)?;
    if !patch.is_null() {
        merge(&mut value, patch);
    }
    Ok(Record::parse("vector.json", &value.to_string())?.0)
}

/// JSON merge patch (RFC 7396 §2).
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let members = target.as_object_mut().expect("it was just made an object");
    for (key, value) in patch {
        if value.is_null() {
            members.remove(key);
        } else {
            merge(members.entry(key.as_str()).or_insert(Value::Null), value);
        }
    }
}

fn check(vector: &Vector, answer: &Answer) -> anyhow::Result<()> {
    ensure!(answer.status == vector.s, "status {} instead of {}", answer.status, vector.s);
    let content_type = answer.field("Content-Type");
    ensure!(content_type == vector.t.as_deref(), "type {content_type:?} instead of {:?}", vector.t);
    for (name, wanted) in &vector.rh {
        let found = answer.field(name);
        ensure!(found == wanted.as_deref(), "{name} is {found:?} instead of {wanted:?}");
    }
    let text = String::from_utf8_lossy(&answer.body);
    if let Some(wanted) = &vector.o {
        ensure!(answer.body == wanted.as_bytes(), "body {text:?} instead of {wanted:?}");
    }
    if let Some(wanted) = &vector.b64 {
        let wanted = base64::engine::general_purpose::STANDARD.decode(wanted)?;
        ensure!(answer.body == wanted, "body {text:?} instead of {wanted:?}");
    }
    if let Some(wanted) = &vector.j {
        let found: Value = serde_json::from_str(&text)?;
        ensure!(found == *wanted, "JSON {found} instead of {wanted}");
    }
    if let Some(wanted) = &vector.y {
        let found: Value = serde_yaml::from_str(&text)?;
        ensure!(found == *wanted, "YAML {found} instead of {wanted}");
    }
    framed(vector, answer)
}

/// What every response satisfies.
fn framed(vector: &Vector, answer: &Answer) -> anyhow::Result<()> {
    let length = answer.field("Content-Length").map(str::parse::<usize>).transpose()?;
    let counted = vector.fields_counted();
    for name in ["Transfer-Encoding", "Content-Encoding", "Metadata-Flavor"] {
        ensure!(counted.contains(&name) || answer.field(name).is_none(), "{name} is there");
    }
    match length {
        None => ensure!(answer.status == 204 && answer.body.is_empty(), "no Content-Length"),
        Some(_) if answer.status == 204 => bail!("Content-Length with 204"),
        Some(_) if vector.q.starts_with("HEAD ") => ensure!(answer.body.is_empty(), "HEAD with a body"),
        Some(length) => {
            ensure!(length == answer.body.len(), "Content-Length {length}, body {}", answer.body.len())
        }
    }
    Ok(())
}

impl Vector {
    /// Header fields this vector expects by itself.
    fn fields_counted(&self) -> Vec<&str> {
        self.rh.iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name.as_str()).collect()
    }
}

#[test]
fn a_wrong_answer_fails_its_vector() {
    struct Wrong(Rendered);
    impl Executor for Wrong {
        fn ask(&mut self, record: &Record, vector: &Vector) -> anyhow::Result<Answer> {
            let mut answer = self.0.ask(record, vector)?;
            answer.body.push(b'\n');
            Ok(answer)
        }
    }
    let mut failures = Vec::new();
    let lines = include_str!("vectors/nocloud.jsonl");
    let asked = ask_all(lines, &mut Wrong(Rendered::default()), &mut failures).expect("nocloud.jsonl");
    assert_eq!(failures.len(), asked, "vectors that take an added newline");
}

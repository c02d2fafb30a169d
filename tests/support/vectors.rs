//! Test vectors: each line has a request and its exact answer. Also checks rules that every answer must satisfy.
//!
//! The files under `tests/vectors/` can test any implementation. The first line of each file names patches (JSON merge
//! patch, RFC 7396) to `record.yaml`. Each further line is a request to the VM with the patch `rec`. The requests run
//! in the order of the file, with one VM per patch.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::http::Method;
use serde::Deserialize;
use serde_json::Value;

use crate::pattern::{Answered, responses};
use crate::question::{Question, slashed};

/// The record behind the vectors.
pub const RECORD: &str = include_str!("../vectors/record.yaml");
/// The vectors of the common file.
pub const ALL: &str = include_str!("../vectors/vectors.jsonl");
/// The address of the guest's first NIC in that record. One answer contains it.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The default destination address of vectors.
const METADATA: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254));

/// One line of a file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vector {
    /// The vector's name.
    pub n: String,
    /// Method and request target.
    q: String,
    /// Destination address.
    to: Option<IpAddr>,
    /// Destination port.
    port: Option<u16>,
    /// The guest's port.
    sp: Option<u16>,
    /// Request header fields.
    #[serde(default)]
    h: BTreeMap<String, String>,
    /// Request body.
    b: Option<String>,
    /// Name of the patch.
    pub rec: Option<String>,
    /// Name under which later vectors find the answer's body.
    save: Option<String>,
    /// Expected status.
    s: u16,
    /// Expected `Content-Type`; `None` if the field must be absent.
    t: Option<String>,
    /// Expected header fields; `null` for a field that must be absent.
    #[serde(default)]
    rh: BTreeMap<String, Option<String>>,
    /// Expected body as text.
    o: Option<String>,
    /// Expected body in base64.
    b64: Option<String>,
    /// Expected body as JSON.
    j: Option<Value>,
    /// Expected body as YAML.
    y: Option<Value>,
    /// Members that the JSON body must have.
    jp: Option<Value>,
    /// A pattern for the whole body, in the form `[set]{count}`.
    r: Option<String>,
}

/// An encoded request, for a connection of its own.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The guest's port.
    pub source_port: u16,
    /// Destination address and port.
    pub to: (IpAddr, u16),
    /// The request, with `Connection: close`.
    pub bytes: Vec<u8>,
}

/// A VM that answers requests.
pub trait Ask {
    /// Sends a request on a new connection. Returns everything received until the service closes it.
    ///
    /// # Errors
    /// The connection cannot be opened, or does not end.
    fn ask(&mut self, asked: &Asked) -> Result<Vec<u8>>;
}

/// The failures of a file, and its number of vectors.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Number of vectors.
    pub asked: usize,
    /// The failures, as `name: reason`.
    pub failures: Vec<String>,
}

impl Outcome {
    /// Checks that the file has this number of vectors and no failures.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert(&self, expected: usize) {
        let failed = self.failures.len();
        assert!(
            self.failures.is_empty(),
            "{failed} of {} vectors fail:\n{}",
            self.asked,
            self.failures.join("\n")
        );
        assert_eq!(self.asked, expected, "another number of vectors");
    }
}

/// Runs the vectors of a file in order. `make` creates the VM of a patched record in JSON.
///
/// # Errors
/// The file is not a file of vectors, or a VM cannot be created.
pub fn run<V: Ask>(lines: &str, make: impl FnMut(&Value) -> Result<V>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    outcome.asked = each(lines, make, |vm, vector, saved| {
        if let Err(error) = holds(vm, vector, saved) {
            outcome.failures.push(format!("{}: {error:#}", vector.n));
        }
    })?;
    Ok(outcome)
}

/// Bodies saved by earlier vectors.
pub type Saved = HashMap<String, String>;

/// All vectors of a file.
///
/// # Panics
/// When a line is not a vector.
#[must_use]
pub fn all(lines: &str) -> Vec<Vector> {
    let vector = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    lines.lines().skip(1).map(vector).collect()
}

/// Calls a function for each vector of a file. Returns their number.
///
/// # Errors
/// Those of [`run`].
pub fn each<V: Ask>(
    lines: &str,
    mut make: impl FnMut(&Value) -> Result<V>,
    mut take: impl FnMut(&mut V, &Vector, &mut Saved),
) -> Result<usize> {
    #[derive(Deserialize)]
    struct Patches {
        patches: HashMap<String, Value>,
    }
    let mut lines = lines.lines();
    let Patches { patches } = serde_json::from_str(lines.next().context("an empty file")?)?;
    let mut vms: HashMap<Option<String>, V> = HashMap::new();
    let (mut saved, mut taken) = (Saved::new(), 0);
    for line in lines {
        let vector: Vector = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let vm = match vms.entry(vector.rec.clone()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let patch = match &vector.rec {
                    Some(rec) => patches.get(rec).with_context(|| format!("no patch {rec}"))?,
                    None => &Value::Null,
                };
                entry.insert(make(&record(patch)?)?)
            }
        };
        take(vm, &vector, &mut saved);
        taken += 1;
    }
    Ok(taken)
}

fn record(patch: &Value) -> Result<Value> {
    let mut value: Value = serde_yaml::from_str(RECORD)?;
    if !patch.is_null() {
        merge(&mut value, patch);
    }
    Ok(value)
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

/// Sends the request of a vector. A GET must have the same answer with HEAD and with additional slashes.
fn holds(vm: &mut impl Ask, vector: &Vector, saved: &mut Saved) -> Result<()> {
    let (method, target) = vector.request()?;
    let answer = vector.ask(vm, method, target, saved)?;
    vector.check(&answer)?;
    if let Some(name) = &vector.save {
        saved.insert(name.clone(), String::from_utf8(answer.body.clone())?);
    }
    if method != "GET" {
        return Ok(());
    }
    let head = vector.ask(vm, "HEAD", target, saved)?;
    let lines = |answer: &Answered| -> Vec<String> {
        answer.head.lines().filter(|line| !line.starts_with("Date: ")).map(str::to_owned).collect()
    };
    ensure!(lines(&head) == lines(&answer), "HEAD has {:?} instead of {:?}", head.head, answer.head);
    ensure!(head.body.is_empty(), "HEAD has a body");
    for target in slashed(target) {
        let other = vector.ask(vm, method, &target, saved)?;
        let same = (other.status, &other.body) == (answer.status, &answer.body);
        ensure!(same, "{target} has another answer: {other:?}");
    }
    Ok(())
}

impl Vector {
    /// Method and target.
    ///
    /// # Errors
    /// `q` does not consist of method and target.
    pub fn request(&self) -> Result<(&str, &str)> {
        self.q.split_once(' ').context("q is method and target")
    }

    /// The destination address.
    #[must_use]
    pub fn to(&self) -> IpAddr {
        self.to.unwrap_or(METADATA)
    }

    /// The request as text: a line `method target address port source-port`, one line per header field, an empty line
    /// and the body. A value from an earlier answer appears as `${name}`.
    #[must_use]
    pub fn as_text(&self) -> String {
        let (port, source_port) = (self.port.unwrap_or(80), self.sp.unwrap_or(40_000));
        let mut text = format!("{} {} {port} {source_port}\n", self.q, self.to());
        for (name, value) in &self.h {
            text.push_str(&format!("{name}:{value}\n"));
        }
        text + "\n" + self.b.as_deref().unwrap_or_default()
    }

    /// The request without values from earlier answers.
    ///
    /// # Errors
    /// Those of [`request`](Self::request).
    pub fn question(&self) -> Result<Question> {
        let (method, target) = self.request()?;
        let given = self.h.iter().filter(|(_, value)| !value.starts_with("${"));
        Ok(Question {
            method: Method::from_token(method),
            to: (self.to(), self.port.unwrap_or(80)),
            source_port: self.sp.unwrap_or(40_000),
            fields: given.map(|(name, value)| (name.clone(), value.clone().into_bytes())).collect(),
            body: self.b.clone().unwrap_or_default().into_bytes(),
            ..Question::get(target)
        })
    }

    /// Sends the request, with another method or target if given.
    ///
    /// # Errors
    /// There is not exactly one answer.
    pub fn ask(&self, vm: &mut impl Ask, method: &str, target: &str, saved: &Saved) -> Result<Answered> {
        let to = self.to();
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {to}\r\n");
        for (name, value) in &self.h {
            let value = match value.strip_prefix("${").and_then(|value| value.strip_suffix('}')) {
                Some(name) => saved.get(name).with_context(|| format!("nothing is saved as {name}"))?,
                None => value,
            };
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(body) = &self.b {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        head.push_str("Connection: close\r\n\r\n");
        head.push_str(self.b.as_deref().unwrap_or_default());
        let asked = Asked {
            source_port: self.sp.unwrap_or(40_000),
            to: (to, self.port.unwrap_or(80)),
            bytes: head.into_bytes(),
        };
        let received = vm.ask(&asked)?;
        let answers = responses(&received, &[method == "HEAD"]);
        let bytes: usize = answers.iter().map(|answer| answer.head.len() + 2 + answer.body.len()).sum();
        let text = String::from_utf8_lossy(&received);
        ensure!(
            answers.len() == 1 && bytes == received.len(),
            "expected exactly one complete answer: {text:?}"
        );
        Ok(answers.into_iter().next().expect("there is one"))
    }

    /// Compares an answer with the vector.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, answer: &Answered) -> Result<()> {
        let text = String::from_utf8_lossy(&answer.body);
        ensure!(answer.status == self.s, "status {} instead of {}: {text:?}", answer.status, self.s);
        let content_type = answer.field("Content-Type");
        ensure!(content_type == self.t.as_deref(), "type {content_type:?} instead of {:?}", self.t);
        for (name, wanted) in &self.rh {
            let found = answer.field(name);
            ensure!(found == wanted.as_deref(), "{name} is {found:?} instead of {wanted:?}");
        }
        if let Some(wanted) = &self.o {
            ensure!(answer.body == wanted.as_bytes(), "body {text:?} instead of {wanted:?}");
        }
        if let Some(wanted) = &self.b64 {
            ensure!(answer.body == STANDARD.decode(wanted)?, "body {text:?} instead of {wanted:?}");
        }
        if let Some(wanted) = &self.j {
            let found: Value = serde_json::from_str(&text).with_context(|| text.to_string())?;
            ensure!(found == *wanted, "JSON {found} instead of {wanted}");
        }
        if let Some(wanted) = &self.y {
            let found: Value = serde_yaml::from_str(&text).with_context(|| text.to_string())?;
            ensure!(found == *wanted, "YAML {found} instead of {wanted}");
        }
        if let Some(wanted) = &self.jp {
            let found: Value = serde_json::from_str(&text).with_context(|| text.to_string())?;
            for (name, wanted) in wanted.as_object().context("jp is an object")? {
                ensure!(found[name] == *wanted, "{name} is {} instead of {wanted}", found[name]);
            }
        }
        if let Some(pattern) = &self.r {
            ensure!(matches(pattern, &text)?, "body {text:?} instead of {pattern}");
        }
        self.framed(answer)
    }

    /// Checks the rules that every answer must satisfy.
    fn framed(&self, answer: &Answered) -> Result<()> {
        let mut names = HashSet::new();
        for (name, _) in answer.fields() {
            ensure!(names.insert(name.to_ascii_lowercase()), "{name} occurs twice");
        }
        for name in ["Transfer-Encoding", "Content-Encoding"] {
            ensure!(answer.field(name).is_none(), "{name} is present");
        }
        // Programs detect GCE by this field.
        let asked_for = self.rh.get("Metadata-Flavor").is_some_and(Option::is_some);
        let google = asked_for || self.q.contains(" /computeMetadata");
        let flavoured = answer.field("Metadata-Flavor");
        ensure!(flavoured == google.then_some("Google"), "Metadata-Flavor is {flavoured:?}");
        ensure!(answer.field("Date").is_some(), "no Date");
        match answer.field("Content-Length").map(str::parse::<usize>).transpose()? {
            None => ensure!(answer.status == 204 && answer.body.is_empty(), "no Content-Length"),
            Some(_) if answer.status == 204 => bail!("Content-Length with 204"),
            Some(_) if self.q.starts_with("HEAD ") => ensure!(answer.body.is_empty(), "HEAD with a body"),
            Some(length) => {
                ensure!(length == answer.body.len(), "Content-Length {length}, body {}", answer.body.len())
            }
        }
        Ok(())
    }
}

/// True if `text` matches the pattern `[set]{count}`. The set consists of ranges and single characters.
fn matches(pattern: &str, text: &str) -> Result<bool> {
    let parts = pattern.strip_prefix('[').and_then(|rest| rest.split_once("]{"));
    let (set, count) = parts.context("the only pattern known is [set]{count}")?;
    let count: usize = count.strip_suffix('}').context("a count ends in }")?.parse()?;
    let set: Vec<char> = set.chars().collect();
    let member = |c: char| {
        let mut at = 0;
        while at < set.len() {
            let range = set.get(at + 1) == Some(&'-') && at + 2 < set.len();
            let (low, high) = if range { (set[at], set[at + 2]) } else { (set[at], set[at]) };
            if (low..=high).contains(&c) {
                return true;
            }
            at += if range { 3 } else { 1 };
        }
        false
    };
    Ok(text.chars().count() == count && text.chars().all(member))
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_pattern_is_a_set_and_a_count() {
        for (text, whether) in
            [("aZ9+", true), ("a/b+", true), ("abc", false), ("abcde", false), ("ab-c", false)]
        {
            assert_eq!(matches("[A-Za-z0-9+/]{4}", text).expect("a pattern"), whether, "{text}");
        }
        assert!(matches("abc", "abc").is_err());
    }
}

//! Every dialect answers its vectors: one request and its exact answer a line, asked in file order.
//!
//! The files under `vectors/` are data any implementation can be held against. The first line of each names
//! patches (JSON merge patch, RFC 7396) to `record.yaml`; each further line is a request to the VM whose
//! record is patched with `rec`. They are asked over HTTP and TCP, on a simulated wire. Vectors of the EC2
//! tree join with that dialect.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use metadata_common::maps::Slot;
use metadata_user::dialect;
use metadata_user::record::Record;
use metadata_user::serve::{Serve, ServeConfig};
use metadata_user::stack::{Stack, StackConfig};
use metadata_user::store::{Interner, Store};
use serde::Deserialize;
use serde_json::Value;
use support::client::{Client, Habits};
use support::pattern::{Answered, responses};
use support::wire::{Faults, World};

const RECORD: &str = include_str!("vectors/record.yaml");
/// Any answer has come by then.
const SOON: Duration = Duration::from_secs(1);
/// The first connection's port; each further one has the next.
const FIRST_PORT: u16 = 40_000;

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

/// One VM: its record rendered, stored and served over TCP to a guest of its own.
struct Vm {
    world: World<Serve>,
    next_port: u16,
}

impl Vm {
    /// Asks on a connection of its own, as most clients do, which the service closes after the answer.
    fn ask(
        &mut self,
        method: &str,
        target: &str,
        fields: &BTreeMap<String, String>,
    ) -> anyhow::Result<Answered> {
        let mut request = format!("{method} {target} HTTP/1.1\r\nHost: 169.254.169.254\r\n");
        for (name, value) in fields {
            write!(request, "{name}: {value}\r\n")?;
        }
        request.push_str("Connection: close\r\n\r\n");
        let talk = self.world.client.begin(self.next_port, request.as_bytes());
        self.next_port += 1;
        let ended = self.world.run(SOON, |world| world.client.talks[talk].ended);
        self.world.client.close(talk);
        let received = &self.world.client.talks[talk].received;
        ensure!(ended, "no end after {SOON:?}, so far {:?}", String::from_utf8_lossy(received));
        let answers = responses(received, &[method == "HEAD"]);
        let octets: usize = answers.iter().map(|answer| answer.head.len() + 2 + answer.body.len()).sum();
        ensure!(
            answers.len() == 1 && octets == received.len(),
            "not one answer of the length it says: {:?}",
            String::from_utf8_lossy(received)
        );
        Ok(answers.into_iter().next().expect("there is one"))
    }
}

/// The VMs of one file: one for each patch, kept from vector to vector.
struct Vms {
    patches: HashMap<String, Value>,
    store: Arc<Store>,
    interner: Interner,
    vms: HashMap<Option<String>, Vm>,
}

impl Vms {
    fn new(patches: HashMap<String, Value>) -> Self {
        let slots = patches.len() as u32 + 1;
        Self { patches, store: Arc::new(Store::new(slots)), interner: Interner::new(), vms: HashMap::new() }
    }

    /// The VM whose record is patched with `rec`.
    fn vm(&mut self, rec: &Option<String>) -> anyhow::Result<&mut Vm> {
        let slot = self.vms.len() as Slot;
        match self.vms.entry(rec.clone()) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let patch = match rec {
                    Some(rec) => self.patches.get(rec).with_context(|| format!("no patch {rec}"))?,
                    None => &Value::Null,
                };
                let responses = dialect::render(&record(patch)?, &mut self.interner);
                self.store.publish(slot, Arc::new(responses))?;
                let serve = Serve::new(Arc::clone(&self.store), ServeConfig::default());
                let stack = Stack::new(StackConfig::default(), serve);
                let client = Client::new(slot, Habits::default());
                let world = World::new(stack, client, Faults::NONE, 0);
                Ok(entry.insert(Vm { world, next_port: FIRST_PORT }))
            }
        }
    }
}

fn run(name: &str, lines: &str, expected: usize) {
    let mut failures = Vec::new();
    let asked = each(lines, |vm, vector| {
        if let Err(error) = holds(vm, vector) {
            failures.push(format!("{}: {error:#}", vector.n));
        }
    });
    assert_eq!(asked.expect(name), expected, "{name} has another number of vectors");
    let failed = failures.len();
    assert!(failures.is_empty(), "{failed} of {expected} vectors of {name} fail:\n{}", failures.join("\n"));
}

/// Goes through the vectors of a file; returns how many there are.
fn each(lines: &str, mut take: impl FnMut(&mut Vm, &Vector)) -> anyhow::Result<usize> {
    let mut lines = lines.lines();
    let first: Patches = serde_json::from_str(lines.next().context("an empty file")?)?;
    let mut vms = Vms::new(first.patches);
    let mut taken = 0;
    for line in lines {
        let vector: Vector = serde_json::from_str(line).with_context(|| line.to_owned())?;
        take(vms.vm(&vector.rec)?, &vector);
        taken += 1;
    }
    Ok(taken)
}

/// Asks what the vector asks. What it reads must also have a HEAD, and not depend on slashes.
fn holds(vm: &mut Vm, vector: &Vector) -> anyhow::Result<()> {
    let (method, target) = vector.request()?;
    let answer = vm.ask(method, target, &vector.h)?;
    check(vector, &answer)?;
    if method != "GET" {
        return Ok(());
    }
    let head = vm.ask("HEAD", target, &vector.h)?;
    let lines = |answer: &Answered| -> Vec<String> {
        answer.head.lines().filter(|line| !line.starts_with("Date: ")).map(str::to_owned).collect()
    };
    ensure!(lines(&head) == lines(&answer), "HEAD has {:?} instead of {:?}", head.head, answer.head);
    ensure!(head.body.is_empty(), "HEAD has a body");
    for target in slashed(target) {
        let other = vm.ask(method, &target, &vector.h)?;
        let same = (other.status, &other.body) == (answer.status, &answer.body);
        ensure!(same, "{target} is another thing: {other:?}");
    }
    Ok(())
}

/// The target with slashes doubled, tripled, and added at the end.
fn slashed(target: &str) -> Vec<String> {
    let (before, origin) = match target.split_once("://") {
        Some((scheme, rest)) => target.split_at(scheme.len() + 3 + rest.find('/').unwrap_or(rest.len())),
        None => ("", target),
    };
    let (path, query) = origin.split_at(origin.find('?').unwrap_or(origin.len()));
    let forms = [path.replace('/', "//"), path.replace('/', "///"), format!("{path}/"), format!("{path}//")];
    forms.map(|path| format!("{before}{path}{query}")).into()
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

fn check(vector: &Vector, answer: &Answered) -> anyhow::Result<()> {
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
fn framed(vector: &Vector, answer: &Answered) -> anyhow::Result<()> {
    let mut names = HashSet::new();
    for (name, _) in answer.fields() {
        ensure!(names.insert(name.to_ascii_lowercase()), "{name} is there twice");
    }
    for name in ["Transfer-Encoding", "Content-Encoding"] {
        ensure!(answer.field(name).is_none(), "{name} is there");
    }
    let flavoured = vector.rh.get("Metadata-Flavor").is_some_and(Option::is_some);
    ensure!(flavoured || answer.field("Metadata-Flavor").is_none(), "Metadata-Flavor is there");
    ensure!(answer.field("Date").is_some(), "no Date");
    match answer.field("Content-Length").map(str::parse::<usize>).transpose()? {
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
    fn request(&self) -> anyhow::Result<(&str, &str)> {
        self.q.split_once(' ').context("q is method and target")
    }
}

#[test]
fn a_wrong_answer_fails_its_vector() {
    each(include_str!("vectors/nocloud.jsonl"), |vm, vector| {
        let (method, target) = vector.request().expect("a request");
        let right = vm.ask(method, target, &vector.h).expect("an answer");
        check(vector, &right).expect("right");
        let longer = Answered { body: [&right.body[..], b"\n"].concat(), ..right.clone() };
        let other = Answered { status: right.status + 1, ..right.clone() };
        let encoded = Answered { head: format!("{}Content-Encoding: gzip\r\n", right.head), ..right.clone() };
        let dateless = Answered { head: right.head.replace("Date: ", "Day: "), ..right };
        for wrong in [longer, other, encoded, dateless] {
            assert!(check(vector, &wrong).is_err(), "{} takes {wrong:?}", vector.n);
        }
    })
    .expect("nocloud.jsonl");
}

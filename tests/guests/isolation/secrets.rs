//! In every dialect, a request that names another guest gets the asking guest's own data or nothing.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use metadata_content::http::Method;
use support::agent::PortArgument;
use support::question::Question;
use support::station::Station;
use support::tap::Shape;
use support::{exposition, privileged, vectors};

use super::{Marks, Node, SPY, VICTIM, Vm, ask, tokens};

/// MACs in the paths of the vectors, and their NICs.
const IN_PATHS: [(&str, u8); 2] = [("52:54:00:12:34:56", 0), ("52:54:00:12:34:57", 1)];
const UUID_IN_PATHS: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

/// Every request of the vectors, with the identifiers of `of` in its path.
fn questions(of: Vm) -> Vec<Question> {
    let questions = vectors::all(vectors::ALL).into_iter().map(|v| v.question().expect("a request"));
    let mut seen = BTreeSet::new();
    let mut questions: Vec<Question> = questions
        // Leave out requests that wait for a change, because no record changes here.
        .filter(|question| !question.target.contains("wait_for_change"))
        .map(|mut question| {
            for (mac, nic) in IN_PATHS {
                question.target = question.target.replace(mac, &of.mac(nic).to_string());
            }
            question.target = question.target.replace(UUID_IN_PATHS, &of.uuid());
            question
        })
        .collect();
    questions.retain(|question| seen.insert(format!("{question:?}")));
    questions
}

/// A way to pretend to be the victim.
struct Claim {
    name: &'static str,
    /// Changes a request.
    change: fn(Question) -> Question,
    /// Fields to add.
    fields: fn() -> Vec<(&'static str, String)>,
    /// Whether the packets have the victim's source address.
    spoofs: bool,
}

fn unchanged(question: Question) -> Question {
    question
}

fn no_fields() -> Vec<(&'static str, String)> {
    Vec::new()
}

fn victims_host() -> Vec<(&'static str, String)> {
    vec![("Host", VICTIM.address().to_string()), ("X-Forwarded-Host", format!("web-{}", VICTIM.0))]
}

fn victims_forwarding() -> Vec<(&'static str, String)> {
    let address = VICTIM.address();
    vec![
        ("X-Forwarded-For", address.to_string()),
        ("X-Real-IP", address.to_string()),
        ("Forwarded", format!("for={address};host=web-{}", VICTIM.0)),
        ("Via", format!("1.1 web-{}", VICTIM.0)),
        ("X-Client-IP", address.to_string()),
        ("True-Client-IP", address.to_string()),
    ]
}

/// The fields in which nova's metadata proxy names its client.
fn victims_ids() -> Vec<(&'static str, String)> {
    vec![
        ("X-Instance-ID", VICTIM.uuid()),
        ("X-Tenant-ID", "p1".into()),
        ("X-Instance-ID-Signature", "0".repeat(64)),
        ("X-Metadata-Provider", VICTIM.uuid()),
        ("X-VM-MAC", VICTIM.mac(0).to_string()),
        ("x-ms-containerid", VICTIM.uuid()),
    ]
}

fn absolute(mut question: Question) -> Question {
    question.target = format!("http://{}{}", VICTIM.address(), question.target);
    question
}

fn absolute_by_name(mut question: Question) -> Question {
    question.target = format!("http://web-{}.example.internal:80{}", VICTIM.0, question.target);
    question
}

fn in_query(mut question: Question) -> Question {
    let glue = if question.target.contains('?') { '&' } else { '?' };
    let (uuid, mac, address) = (VICTIM.uuid(), VICTIM.mac(0), VICTIM.address());
    question.target +=
        &format!("{glue}instance-id={uuid}&uuid={uuid}&mac={mac}&ip={address}&vm=web-{}", VICTIM.0);
    question
}

fn below_an_id(mut question: Question) -> Question {
    question.target = format!("/{}{}", VICTIM.uuid(), question.target);
    question
}

const CLAIMS: [Claim; 9] = [
    Claim { name: "nothing more", change: unchanged, fields: no_fields, spoofs: false },
    Claim { name: "host", change: unchanged, fields: victims_host, spoofs: false },
    Claim { name: "forwarding", change: unchanged, fields: victims_forwarding, spoofs: false },
    Claim { name: "ids of a proxy", change: unchanged, fields: victims_ids, spoofs: false },
    Claim { name: "absolute target", change: absolute, fields: no_fields, spoofs: false },
    Claim { name: "absolute target by name", change: absolute_by_name, fields: no_fields, spoofs: false },
    Claim { name: "query", change: in_query, fields: no_fields, spoofs: false },
    Claim { name: "path", change: below_an_id, fields: no_fields, spoofs: false },
    Claim { name: "source address", change: unchanged, fields: no_fields, spoofs: true },
];

/// Sends every request with this claim. Fails if an answer or a frame has a mark of the victim. Returns the number of
/// answers with status 200.
fn learns_nothing(
    spy: &mut Station,
    questions: &[Question],
    marks: &Marks,
    claim: &Claim,
    keys: &[(&'static str, String)],
) -> Result<usize> {
    let fields: Vec<_> = (claim.fields)().into_iter().chain(keys.iter().cloned()).collect();
    let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut good = 0;
    for question in questions {
        let question = (claim.change)(question.clone());
        spy.transcript();
        let (status, body) = ask(spy, &question, &fields)?;
        good += usize::from(status == 200);
        let asked = || format!("{} {}", question.method.as_str(), question.target);
        // One answer contains the packet's source address, which the spy itself claimed.
        let claimed = if claim.spoofs { VICTIM.address().to_string() } else { String::new() };
        let leaked = |bytes: &[u8]| marks.within(&without(bytes, &claimed)).map(str::to_owned);
        if let Some(mark) = leaked(&body) {
            anyhow::bail!("the victim's `{mark}` is in the answer to {}", asked());
        }
        // No frame may contain a mark either.
        for frame in spy.transcript() {
            // A spoofed packet's answer goes to the victim's address, so skip the IP header.
            let payload = frame.get(if claim.spoofs { 34 } else { 14 }..).unwrap_or_default();
            if let Some(mark) = leaked(payload) {
                anyhow::bail!("the victim's `{mark}` is in a frame after {}: {frame:02x?}", asked());
            }
        }
    }
    Ok(good)
}

/// Removes `text`, which the asking guest knows, from the bytes.
fn without(bytes: &[u8], text: &str) -> Vec<u8> {
    let mut rest = bytes.to_vec();
    while let Some(at) = rest.windows(text.len().max(1)).position(|part| part == text.as_bytes()) {
        rest.drain(at..at + text.len());
    }
    rest
}

#[privileged::test]
fn no_claim_in_any_dialect_gets_an_byte_of_another_vm() {
    let node = Node::new().expect("a node");
    for vm in [SPY, VICTIM] {
        vm.write(node.records.path(), |_| ()).expect("a record");
    }
    let station =
        |name, vm: Vm| node.station(name, vm.mac(0), vm.address(), Shape::default()).expect("a tap");
    let (mut spy, mut victim) = (station("tap0", SPY), station("tap1", VICTIM));
    let ports = [PortArgument::new("tap0", SPY.mac(0)), PortArgument::new("tap1", VICTIM.mac(0))];
    let agent = node.agent(&ports).expect("an agent");
    spy.remembers = true;

    let marks = victims_marks(&mut victim).expect("the victim's marks");
    let keys = tokens(&mut victim, 300).expect("tokens of the victim");
    let stolen: Vec<_> = keys.iter().map(|(_, field, token)| (*field, token.clone())).collect();
    for (words, of) in [("its own", SPY), ("the victim's", VICTIM)] {
        let questions = questions(of);
        for claim in &CLAIMS {
            spy.address = if claim.spoofs { VICTIM.address() } else { SPY.address() };
            for keys in [&[][..], &stolen] {
                let label = format!(
                    "claim by {}, paths with {words} identifiers, {} stolen keys",
                    claim.name,
                    keys.len()
                );
                // Enough requests succeed to show that the service answers.
                let good = learns_nothing(&mut spy, &questions, &marks, claim, keys)
                    .unwrap_or_else(|error| panic!("{label}: {error:#}"));
                let enough = good > 20 || claim.name == "path";
                assert!(enough, "{label}: only {good} of {} answers are good", questions.len());
            }
        }
    }
    exposition::balance(&agent, 0).expect("every frame is accounted for");
}

/// The victim's marks and derived ids. Also checks that the victim's own answers contain them in most dialects.
fn victims_marks(victim: &mut Station) -> Result<Marks> {
    let mut marks = VICTIM.marks();
    for path in ["/latest/meta-data/instance-id", "/metadata/v1/id"] {
        let (status, body) = ask(victim, &Question::get(path), &[])?;
        ensure!(status == 200 && body.len() >= 8, "{path}: {status}");
        marks.add(String::from_utf8(body)?);
    }
    let mut marked = 0;
    let asked = questions(VICTIM);
    for question in asked.iter().filter(|question| question.method == Method::Get) {
        let (_, body) = ask(victim, question, &[]).context("the victim's own question")?;
        marked += usize::from(marks.within(&body).is_some());
    }
    ensure!(marked > 30, "only {marked} of {} answers contain a mark of the victim", asked.len());
    ensure!(
        SPY.marks().within(VICTIM.record().to_string().as_bytes()).is_none(),
        "the spy and the victim share marks"
    );
    Ok(marks)
}

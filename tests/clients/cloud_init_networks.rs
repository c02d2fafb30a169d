//! Every network document means to every renderer of cloud-init what the record says.
//!
//! Machines with random networks are rendered by the unmodified renderers of the cloud-init in several Debian releases.
//! What comes out is read again and compared with the record. With `--nocapture` the test prints the table of
//! `reference/guest-networks.md`. `XDP_IMDS_CLOUD_INIT=DIRECTORY` uses a checkout instead of the releases.

mod applied;
mod documents;
mod known;
mod machine;
mod meaning;

use documents::{DOCUMENTS, Document};
use fastrand::Rng;
use known::KNOWN;
use machine::{ALL, Machine, machine};
use meaning::{Difference, Meaning, Part};
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use support::cloudinit::{CHECKOUT, CloudInit, Rendering};
use support::seed::seed_or;

/// The renderers, by cloud-init's names.
const RENDERERS: [&str; 5] = ["eni", "sysconfig", "networkd", "network-manager", "netplan"];
/// Debian releases whose cloud-init renders: 20.4, 22.4, 25.1 and 26.2 or later.
const SUITES: [&str; 4] = ["bullseye", "bookworm", "trixie", "sid"];
/// The release whose cloud-init changes without a change of ours: a listed fault that it no longer has is printed only.
const MOVING: &str = "sid";
/// Number of machines from the run's own seed, in addition to those that are always the same.
const RANDOM: usize = 25;
/// The seed of those machines unless the run has another: which faults of cloud-init a run finds must not depend on
/// chance.
const RANDOM_SEED: u64 = 3;
/// Most differences of one cell that a failure shows.
const SHOWN: usize = 3;

/// What a renderer made of one document.
#[derive(Debug, Deserialize)]
struct Outcome {
    meaning: Option<Meaning>,
    /// The release has no such renderer.
    #[serde(default)]
    is_absent: bool,
    #[serde(default)]
    trouble: String,
    #[serde(default)]
    files: BTreeMap<String, String>,
}

/// The differences and the numbers of their machines, by document and renderer.
type Cells<'a> = BTreeMap<(&'a str, &'a str), Vec<(Difference, usize)>>;

/// One document of one machine.
struct Case {
    document: &'static Document,
    text: String,
    machine: usize,
}

#[test]
fn network_documents_mean_the_same_to_every_renderer() {
    let mut random = Rng::with_seed(seed_or(RANDOM_SEED));
    let mut fixed = Rng::with_seed(1);
    let machines: Vec<Machine> = (0..ALL + RANDOM)
        .map(|number| {
            if number < ALL { machine(number, &mut fixed) } else { machine(random.usize(..ALL), &mut random) }
        })
        .collect();
    let suites: &[&str] = if std::env::var_os(CHECKOUT).is_some() { &["bookworm"] } else { &SUITES };
    let mut wrong = Vec::new();
    for suite in suites {
        let Some(cloud_init) = CloudInit::of_or_skip(suite) else { return };
        let release = release(&cloud_init.version().expect("cloud-init has a version"));
        let documents = DOCUMENTS.iter().filter(|document| document.since <= release);
        let cases: Vec<Case> = documents
            .flat_map(|document| {
                machines.iter().enumerate().map(move |(number, machine)| (document, number, machine))
            })
            .filter(|(document, _, machine)| (document.takes)(machine))
            .map(|(document, machine, of)| Case { document, text: document.of(of, release), machine })
            .collect();
        let asked = cases.iter().map(|case| {
            json!({
                "client": case.document.client,
                "document": case.text,
                "macs": machines[case.machine].macs,
            })
        });
        let asked = json!({ "renderers": RENDERERS, "cases": asked.collect::<Vec<_>>() });
        let Rendering { version, outcomes } = cloud_init.render(&asked).expect("cloud-init renders");
        let mut cells = Cells::new();
        for (case, outcomes) in cases.iter().zip(outcomes) {
            let outcomes: Vec<Outcome> = serde_json::from_value(outcomes).expect("outcomes");
            for (renderer, outcome) in RENDERERS.into_iter().zip(outcomes) {
                if outcome.is_absent {
                    continue;
                }
                let found = cells.entry((case.document.name, renderer)).or_default();
                let differences = differences(case, &machines[case.machine], &outcome);
                found.extend(differences.into_iter().map(|difference| (difference, case.machine)));
            }
        }
        print_table(&version, &cells);
        wrong.extend(unknown(release, &cells, &machines));
        let stale = stale(release, &cells);
        if *suite == MOVING {
            stale.iter().for_each(|cell| println!("{cell}"));
        } else {
            wrong.extend(stale);
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_rendered_network_reaches_its_gateways() {
    let Some(cloud_init) = CloudInit::of_or_skip("trixie") else { return };
    let document = &DOCUMENTS[0];
    let release = release(&cloud_init.version().expect("cloud-init has a version"));
    // One NIC each: IPv4, IPv6, both, both with a link-local gateway, several addresses, and a /32 address.
    let machines: Vec<Machine> = (0..=5).map(|number| machine(number, &mut Rng::with_seed(1))).collect();
    let cases = machines.iter().map(
        |machine| json!({"client": document.client, "document": document.of(machine, release), "macs": machine.macs}),
    );
    let asked = json!({ "renderers": ["netplan", "eni"], "cases": cases.collect::<Vec<_>>() });
    let rendered = cloud_init.render(&asked).expect("cloud-init renders").outcomes;
    for (number, (machine, outcomes)) in machines.iter().zip(rendered).enumerate() {
        let outcomes: Vec<Outcome> = serde_json::from_value(outcomes).expect("outcomes");
        for (renderer, outcome) in ["netplan", "eni"].into_iter().zip(outcomes) {
            if (number, renderer) == (5, "eni") {
                // A fault of cloud-init that `known.rs` lists.
                continue;
            }
            let meaning = outcome.meaning.unwrap_or_else(|| panic!("{renderer}: {}", outcome.trouble));
            if let Err(error) = applied::reaches_its_gateways(&meaning.devices["eth0"]) {
                panic!("{renderer}: {error:#}, with {}", machine.record["network"]);
            }
        }
    }
}

fn differences(case: &Case, machine: &Machine, outcome: &Outcome) -> Vec<Difference> {
    let wanted = (case.document.says)(&machine.meaning);
    match &outcome.meaning {
        Some(got) => {
            let mut found = wanted.differences(got);
            if let Some((_, how)) = found.first_mut() {
                how.push_str(&format!("\n      {}\n      {:?}", case.text, outcome.files));
            }
            found
        }
        None => vec![(
            Part::Anything,
            format!("{}\n      {}\n      {:?}", outcome.trouble, case.text, outcome.files),
        )],
    }
}

/// Year and number of a release.
fn release(version: &str) -> (u32, u32) {
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse().ok());
    let mut next = || numbers.next().unwrap_or_else(|| panic!("`{version}` is no release of cloud-init"));
    (next(), next())
}

/// Describes the differences that are no known fault of cloud-init.
fn unknown(release: (u32, u32), cells: &Cells<'_>, machines: &[Machine]) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((document, renderer), found) in cells {
        let is_known = |part| KNOWN.iter().any(|known| known.covers(document, renderer, release, part));
        let mut new: Vec<_> = found.iter().filter(|((part, _), _)| !is_known(*part)).collect();
        new.sort_by_key(|((part, _), _)| *part);
        new.dedup_by_key(|((part, _), _)| *part);
        for ((part, how), machine) in new.into_iter().take(SHOWN) {
            let (year, number) = release;
            let record = &machines[*machine].record["network"];
            wrong.push(format!("  {document}, {renderer}, {year}.{number}: {part}: {how}\n      {record}"));
        }
    }
    wrong
}

/// Describes the faults of cloud-init that are listed and did not occur. Machines of the run's own seed do not count,
/// because not every one of them has every part.
fn stale(release: (u32, u32), cells: &Cells<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((document, renderer), found) in cells {
        let occurs = |part: Part| found.iter().any(|((other, _), machine)| *other == part && *machine < ALL);
        for part in Part::ALL.into_iter().filter(|part| !occurs(*part)) {
            for known in KNOWN.iter().filter(|known| known.covers(document, renderer, release, part)) {
                let (year, number) = release;
                let issue = known.issue.map_or_else(String::new, |issue| format!(" as cloud-init {issue}"));
                wrong.push(format!(
                    "  {document}, {renderer}, {year}.{number}: {part}: listed{issue}, but right"
                ));
            }
        }
    }
    wrong
}

fn print_table(version: &str, cells: &Cells<'_>) {
    for document in &DOCUMENTS {
        let row: Vec<String> = RENDERERS
            .iter()
            .map(|renderer| {
                let Some(found) = cells.get(&(document.name, *renderer)) else { return "–".to_owned() };
                let parts: BTreeSet<Part> = found.iter().map(|((part, _), _)| *part).collect();
                let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                if parts.is_empty() { "all".to_owned() } else { format!("not {}", parts.join(", ")) }
            })
            .collect();
        if row.iter().any(|cell| cell != "–") {
            println!("| {} | {version} | {} |", document.name, row.join(" | "));
        }
    }
}

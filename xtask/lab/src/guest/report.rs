//! Reads the document that the guest writes.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;
use support::agent::Sample;
use support::guest::METADATA;

use super::wire::{Exchange, Finding};
use super::{BootOutcome, BootSubject};

/// The text by which cloud-init's log announces a sleep before a retry (`url_helper.py`, 22.4 to 25.1).
const SLEEP: &str = "Please wait ";
/// The text by which the same log announces an attempt: `url_helper.py[DEBUG]: [1/6] open 'http://…'` is the second of
/// six.
const ATTEMPT: &str = "url_helper.py[DEBUG]: [";
/// The text by which it announces the source of the network configuration (`stages.py`).
const NETWORK: &str = "Applying network configuration from ";
/// The stages of cloud-init.
const STAGES: [&str; 4] = ["init-local", "init", "modules-config", "modules-final"];
/// Modules whose warnings are about this image, which has no SSH server and configures its NIC by itself.
const OF_THE_IMAGE: [&str; 2] = ["activators.py", "cc_set_passwords.py"];

/// The document that the image's `boot-report` writes.
#[derive(Debug, Deserialize)]
pub(super) struct GuestReport {
    /// Seconds since the kernel started.
    pub(super) uptime_seconds: f64,
    /// Name and version of the cloud-init package.
    pub(super) package: String,
    /// The values of SMBIOS, by the kernel's names.
    pub(super) firmware: BTreeMap<String, String>,
    /// cloud-init's `result.json`; `None` if it did not finish.
    result: Option<Versioned<CloudInitResult>>,
    /// cloud-init's `status.json`.
    status: Option<Versioned<serde_json::Map<String, serde_json::Value>>>,
    pub(super) cloud_id: String,
    pub(super) instance_id: String,
    pub(super) hostname: String,
    /// The content of authorized_keys files, by path.
    pub(super) authorized_keys: BTreeMap<String, String>,
    /// The content of the file that user-data writes; `None` if user-data had no effect.
    pub(super) marker: Option<String>,
    /// The output of `ip -brief -4 address`.
    addresses: String,
    /// The file with cloud-init's network configuration.
    pub(super) interfaces: String,
    /// Lines of cloud-init's log about requests, DHCP, the network, warnings and errors.
    log: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Versioned<T> {
    v1: T,
}

#[derive(Debug, Deserialize)]
struct CloudInitResult {
    datasource: String,
    errors: Vec<String>,
}

impl GuestReport {
    /// Returns the datasource class with its details, if cloud-init finished.
    pub(super) fn datasource(&self) -> Option<&str> {
        self.result.as_ref().map(|result| result.v1.datasource.as_str())
    }

    /// Returns the errors in cloud-init's result; `None` if it did not finish.
    pub(super) fn errors(&self) -> Option<&[String]> {
        self.result.as_ref().map(|result| result.v1.errors.as_slice())
    }

    /// Returns the time that cloud-init slept between attempts, in total.
    pub(super) fn retry_sleep(&self) -> Duration {
        let sleeps = self.log.iter().filter_map(|line| {
            let (_, rest) = line.split_once(SLEEP)?;
            rest.split(' ').next()?.parse::<f64>().ok()
        });
        Duration::from_secs_f64(sleeps.sum())
    }

    /// Returns the number of attempts that cloud-init made after a first one failed.
    pub(super) fn further_attempts(&self) -> usize {
        let attempts = self.log.iter().filter_map(|line| line.split_once(ATTEMPT)?.1.split('/').next());
        attempts.filter(|number| *number != "0").count()
    }

    /// Returns the source of the network configuration that cloud-init applied last.
    pub(super) fn network_source(&self) -> Option<&str> {
        let sources = self.log.iter().rev().filter_map(|line| line.split_once(NETWORK)?.1.split(' ').next());
        // Some versions write `ds` as the name of an enum's variant.
        sources.map(|word| word.rsplit('.').next().unwrap_or(word)).next()
    }

    /// Returns the first address that is not the loopback's.
    pub(super) fn address(&self) -> Option<Ipv4Addr> {
        let nic = self.addresses.lines().find(|line| !line.starts_with("lo "))?;
        nic.split_whitespace().nth(2)?.split('/').next()?.parse().ok()
    }

    /// Returns the warnings and errors that metadata or the network may have caused, and the others.
    pub(super) fn warnings(&self) -> (Vec<&str>, Vec<&str>) {
        let doubtful = self
            .log
            .iter()
            .map(String::as_str)
            .filter(|line| ["WARN", "ERROR", "CRITICAL"].iter().any(|level| line.contains(level)));
        doubtful.partition(|line| {
            // `2026-01-01 00:00:00,000 - module.py[WARNING]: …`
            let module = line.split(" - ").nth(1).and_then(|rest| rest.split('[').next());
            !OF_THE_IMAGE.contains(&module.unwrap_or_default())
        })
    }

    /// Returns start and duration of each stage of cloud-init, in seconds, with its name, from `status.json`.
    pub(super) fn stages(&self) -> Vec<(f64, f64, &str)> {
        let Some(status) = &self.status else { return Vec::new() };
        let stages = status.v1.iter().filter_map(|(name, stage)| {
            let (start, finished) = (stage.get("start")?.as_f64()?, stage.get("finished")?.as_f64()?);
            Some((start, finished - start, name.as_str()))
        });
        let mut stages: Vec<_> = stages.collect();
        stages.sort_by(|one, other| one.0.total_cmp(&other.0));
        stages
    }

    /// Returns the stages that did not finish.
    pub(super) fn unfinished(&self) -> Vec<&'static str> {
        let finished = self.stages();
        STAGES.into_iter().filter(|stage| !finished.iter().any(|(_, _, name)| name == stage)).collect()
    }
}

// Prints a boot and its findings on the terminal.

/// The file beside the logs that lists each request.
const REQUESTS: &str = "requests.log";
/// The root of an EC2 tree. Below it each value is a document, too many to show.
const TREE: &str = "/meta-data/";

/// Prints the findings and figures of one boot, and writes all of its requests to a file beside its logs.
pub(super) fn boot(subject: &BootSubject, outcome: &BootOutcome, findings: &[Finding]) -> Result<()> {
    let report = &outcome.report;
    let (name, package) = (subject.dialect.name(), report.package.replace('\t', " "));
    println!("\nguest {} for {name} ({package}, {})", subject.hostname, subject.mac);
    for Finding { what, found, holds } in findings {
        println!("  {} {what:<16} {found}", if *holds { "ok  " } else { "FAIL" });
    }
    times(outcome);
    let exchanges = &outcome.traffic.exchanges;
    println!("\nrequests on the guest's wire");
    for line in summary(exchanges) {
        println!("  {line}");
    }
    println!(
        "  {} connections, {} segments sent again",
        outcome.traffic.connections, outcome.traffic.repeated
    );
    let events = &outcome.traffic.events;
    if !events.is_empty() {
        println!("\nrequests about events");
        events.iter().for_each(|exchange| println!("  {}", line(exchange)));
    }
    println!("\nnetwork configuration written by cloud-init");
    let stanzas = report.interfaces.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    stanzas.for_each(|line| println!("  {line}"));
    println!("\nthe agent's counters that grew during the boot");
    for line in counted(outcome) {
        println!("  {line}");
    }
    let (serious, others) = report.warnings();
    if !serious.is_empty() || !others.is_empty() {
        println!("\nwarnings of cloud-init");
        serious.iter().chain(&others).for_each(|line| println!("  {line}"));
    }
    println!("\nconsole, packet dump and logs: {}", outcome.directory.display());
    let all = exchanges.iter().chain(events).fold(String::new(), |mut all, exchange| {
        // Writing to a string cannot fail.
        let _written = writeln!(all, "{:>9.3} s  {}", exchange.at.as_secs_f64(), line(exchange));
        all
    });
    let file = outcome.directory.join(REQUESTS);
    fs::write(&file, all).with_context(|| format!("cannot write {}", file.display()))
}

fn times(outcome: &BootOutcome) {
    let (wall, uptime) = (outcome.time.as_secs_f64(), outcome.report.uptime_seconds);
    println!("\ntime");
    println!(
        "  {wall:.1} s from power-on to report under {} ({uptime:.1} s by the guest's clock)",
        outcome.accelerator
    );
    for (_, took, stage) in outcome.report.stages() {
        println!("  {took:>6.1} s  cloud-init {stage}");
    }
    let exchanges = &outcome.traffic.exchanges;
    let waited: Duration = exchanges.iter().map(|exchange| exchange.took).sum();
    let (crawl, waited) = (crawl(exchanges).as_secs_f64(), waited.as_secs_f64() * 1e3);
    println!(
        "  {crawl:>6.1} s  from the first request to the last answer; the agent's answers took {waited:.1} ms of it"
    );
}

/// Returns the time from the first request to the last answer.
fn crawl(exchanges: &[Exchange]) -> Duration {
    exchanges.last().map_or(Duration::ZERO, |last| last.at + last.took)
}

/// Returns a line for each request. Consecutive successful requests below one tree share a line.
fn summary(exchanges: &[Exchange]) -> Vec<String> {
    let tree = |exchange: &Exchange| {
        let (root, rest) = exchange.request.split_once(TREE)?;
        (exchange.answered_well() && !rest.is_empty()).then(|| format!("{root}{TREE}"))
    };
    let runs = exchanges.chunk_by(|one, other| tree(one).is_some() && tree(one) == tree(other));
    let lines = runs.map(|run| match run {
        [first, .., last] => {
            let slowest = run.iter().map(|exchange| exchange.took).max().unwrap_or_default();
            let below = tree(first).unwrap_or_default();
            let took = (last.at + last.took).saturating_sub(first.at).as_secs_f64();
            format!(
                "{:>8.2} ms  {} × {below}… in {took:.1} s; slowest shown",
                slowest.as_secs_f64() * 1e3,
                run.len()
            )
        }
        _ => run.iter().map(line).collect(),
    });
    lines.collect()
}

fn line(exchange: &Exchange) -> String {
    let answer = exchange.answer.as_deref().unwrap_or("no answer");
    let server =
        if exchange.server == METADATA { String::new() } else { format!(" from {}", exchange.server) };
    format!("{:>8.2} ms  {}{server}  →  {answer}", exchange.took.as_secs_f64() * 1e3, exchange.request)
}

/// Returns the agent's counters that grew.
fn counted(outcome: &BootOutcome) -> Vec<String> {
    let (before, after) = &outcome.metrics;
    let moved = after.samples().iter().filter_map(|sample| {
        let same = |other: &&Sample| other.name == sample.name && other.labels == sample.labels;
        let from = before.samples().iter().find(same).map_or(0.0, |old| old.value);
        let labels: Vec<_> = sample.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let grown = sample.value - from;
        (grown > 0.0).then(|| format!("{grown:>8}  {} {}", sample.name, labels.join(" ")))
    });
    moved.collect()
}

/// Prints one line for each boot.
pub(super) fn table(boots: &[(BootSubject, BootOutcome, Vec<Finding>)]) {
    println!(
        "\n{:<10} {:<9} {:>9} {:>8} {:>9} {:>8}",
        "dialect", "findings", "boot", "crawl", "requests", "slept"
    );
    for (subject, outcome, findings) in boots {
        let exchanges = &outcome.traffic.exchanges;
        println!(
            "{:<10} {:<9} {:>7.1} s {:>6.1} s {:>9} {:>6} s",
            subject.dialect.name(),
            format!("{}/{}", findings.iter().filter(|finding| finding.holds).count(), findings.len()),
            outcome.time.as_secs_f64(),
            crawl(exchanges).as_secs_f64(),
            exchanges.len(),
            outcome.report.retry_sleep().as_secs_f64(),
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Exchange, GuestReport, crawl, summary};
    use std::net::Ipv4Addr;
    use std::time::Duration;
    use support::guest::METADATA;

    pub(crate) fn report(log: &[&str]) -> GuestReport {
        let document = serde_json::json!({
            "uptime_seconds": 40.0, "package": "cloud-init\t22.4.2", "cloud_id": "nocloud",
            "firmware": {"product_uuid": "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"},
            "result": {"v1": {"datasource": "DataSourceNoCloudNet", "errors": []}},
            "status": {"v1": {
                "stage": null,
                "modules-final": {"errors": [], "start": 30.0, "finished": 31.0},
                "init": {"errors": [], "start": 10.0, "finished": 12.5},
                "modules-init": {"errors": [], "start": null, "finished": null},
            }},
            "instance_id": "i", "hostname": "h", "authorized_keys": {}, "marker": null,
            "addresses": "lo    UNKNOWN  127.0.0.1/8\neth0  UP  10.0.2.20/16",
            "interfaces": "auto lo", "log": log,
        });
        serde_json::from_value(document).expect("a report")
    }

    #[test]
    fn sleeps_and_further_attempts_are_added_up() {
        let quiet = report(&[
            "2026-01-01 00:00:00,000 - url_helper.py[DEBUG]: [0/11] open 'http://x/v1/meta-data' with {}",
            "2026-01-01 00:00:00,100 - url_helper.py[DEBUG]: Read from http://x/v1/meta-data (200, 9b) after 1 attempts",
        ]);
        assert_eq!((quiet.retry_sleep(), quiet.further_attempts()), (Duration::ZERO, 0));
        let slow = report(&[
            "t - url_helper.py[DEBUG]: [0/6] open 'http://x/openstack' with {}",
            "t - url_helper.py[DEBUG]: Please wait 1 seconds while we wait to try again",
            "t - url_helper.py[DEBUG]: [1/6] open 'http://x/openstack' with {}",
            "t - url_helper.py[DEBUG]: Please wait 0.5 seconds while we wait to try again",
            "t - url_helper.py[DEBUG]: [2/6] open 'http://x/openstack' with {}",
        ]);
        assert_eq!((slow.retry_sleep(), slow.further_attempts()), (Duration::from_millis(1_500), 2));
    }

    #[test]
    fn stages_are_sorted_by_their_start_and_missing_ones_are_named() {
        let report = report(&[]);
        let names: Vec<_> = report.stages().into_iter().map(|(_, took, name)| (name, took)).collect();
        assert_eq!(names, [("init", 2.5), ("modules-final", 1.0)]);
        assert_eq!(report.unfinished(), ["init-local", "modules-config"]);
    }

    #[test]
    fn the_network_configuration_applied_last_is_used() {
        let report = report(&[
            "t - stages.py[INFO]: Applying network configuration from fallback bringup=False: {}",
            "t - stages.py[INFO]: Applying network configuration from ds bringup=True: {}",
        ]);
        assert_eq!(report.network_source(), Some("ds"));
        assert_eq!(report.address(), Some(Ipv4Addr::new(10, 0, 2, 20)));
    }

    #[test]
    fn only_warnings_about_the_image_are_set_apart() {
        let image = "t - cc_set_passwords.py[WARNING]: Ignoring config 'ssh_pwauth: None'.";
        let called = "t - DataSourceEc2.py[WARNING]: Calling 'http://x/latest/api/token' failed [0/120s]";
        let report = report(&[image, called, "t - url_helper.py[DEBUG]: [0/6] open 'http://x' with {}"]);
        assert_eq!(report.warnings(), (vec![called], vec![image]));
    }

    fn exchange(number: u64, request: &str, status: &str) -> Exchange {
        Exchange {
            request: request.to_owned(),
            server: METADATA.into(),
            answer: Some(format!("HTTP/1.1 {status}")),
            at: Duration::from_secs(number),
            took: Duration::from_millis(number),
            hops: 64,
        }
    }

    #[test]
    fn a_tree_is_one_line_and_a_failed_request_in_it_another() {
        let crawled = [
            exchange(0, "PUT /latest/api/token", "200 OK"),
            exchange(1, "GET /latest/meta-data/", "200 OK"),
            exchange(2, "GET /latest/meta-data/a", "200 OK"),
            exchange(3, "GET /latest/meta-data/b", "200 OK"),
            exchange(4, "GET /latest/meta-data/c", "404 Not Found"),
        ];
        let expected = [
            "    0.00 ms  PUT /latest/api/token  →  HTTP/1.1 200 OK",
            "    1.00 ms  GET /latest/meta-data/  →  HTTP/1.1 200 OK",
            "    3.00 ms  2 × GET /latest/meta-data/… in 1.0 s; slowest shown",
            "    4.00 ms  GET /latest/meta-data/c  →  HTTP/1.1 404 Not Found",
        ];
        assert_eq!(summary(&crawled), expected);
        assert_eq!(crawl(&crawled), Duration::from_millis(4_004));
    }
}

//! What the guest says, judged against its record, and printed.

use super::boot::{Outcome, Subject};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The files of a NoCloud seed that Debian 12's cloud-init asks for.
const SEED: [&str; 3] = ["/v1/meta-data", "/v1/user-data", "/v1/vendor-data"];
/// How cloud-init's log announces each sleep before a retry (`url_helper.py`, 22.4 to 25.1).
const SLEEP: &str = "Please wait ";

/// The document the image's `boot-report` writes.
#[derive(Debug, Deserialize)]
pub(super) struct GuestReport {
    /// Since the kernel started.
    uptime_seconds: f64,
    /// Name and version of the cloud-init package.
    package: String,
    /// cloud-init's `result.json`; nothing when it did not finish.
    result: Option<Versioned<CloudInitResult>>,
    /// cloud-init's `status.json`.
    status: Option<Versioned<serde_json::Map<String, serde_json::Value>>>,
    instance_id: String,
    hostname: String,
    /// By path.
    authorized_keys: BTreeMap<String, String>,
    /// What user-data left, if it had any effect.
    marker: Option<String>,
    addresses: String,
    /// Lines of cloud-init's log: requests, warnings, errors.
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

/// One thing that must hold.
#[derive(Debug)]
pub(super) struct Finding {
    what: &'static str,
    found: String,
    pub(super) holds: bool,
}

impl GuestReport {
    /// What cloud-init slept between retries of a request, in all.
    fn retry_sleep(&self) -> Duration {
        let sleeps = self.log.iter().filter_map(|line| {
            let (_, rest) = line.split_once(SLEEP)?;
            rest.split(' ').next()?.parse::<f64>().ok()
        });
        Duration::from_secs_f64(sleeps.sum())
    }

    /// When each stage of cloud-init began and how long it took, by its `status.json`.
    fn stages(&self) -> Vec<(f64, f64, &str)> {
        let Some(status) = &self.status else { return Vec::new() };
        let stages = status.v1.iter().filter_map(|(name, stage)| {
            let (start, finished) = (stage.get("start")?.as_f64()?, stage.get("finished")?.as_f64()?);
            Some((start, finished - start, name.as_str()))
        });
        let mut stages: Vec<_> = stages.collect();
        stages.sort_by(|one, other| one.0.total_cmp(&other.0));
        stages
    }
}

/// Judges a boot.
pub(super) fn findings(subject: &Subject, outcome: &Outcome) -> Vec<Finding> {
    let report = &outcome.report;
    let (datasource, errors) = match &report.result {
        Some(result) => (result.v1.datasource.as_str(), result.v1.errors.join("; ")),
        None => ("none: cloud-init left no result", "unknown".to_owned()),
    };
    let holders = report.authorized_keys.iter().filter(|(_, keys)| keys.contains(subject.ssh_key));
    let holders: Vec<_> = holders.map(|(path, _)| path.as_str()).collect();
    let marker = report.marker.as_deref().map_or("no effect", str::trim_end);
    let sleep = report.retry_sleep();
    let asked: BTreeSet<_> =
        outcome.traffic.exchanges.iter().filter_map(|e| e.request.split(' ').nth(1)).collect();
    let refused = outcome.traffic.exchanges.iter().filter(|e| !answered_well(e.answer.as_deref())).count();
    vec![
        finding("datasource", datasource, datasource.starts_with("DataSourceNoCloud")),
        finding("errors", or(&errors, "none"), errors.is_empty()),
        finding("instance-id", &report.instance_id, report.instance_id == subject.instance_id),
        finding("hostname", &report.hostname, report.hostname == subject.hostname),
        finding("ssh key in", or(&holders.join(", "), "no file"), !holders.is_empty()),
        finding("user-data", marker, marker == subject.marker),
        finding("retry sleep", &format!("{} s", sleep.as_secs_f64()), sleep.is_zero()),
        finding(
            "seed requests",
            &format!("{} made, {refused} without a good answer", outcome.traffic.exchanges.len()),
            refused == 0 && SEED.iter().all(|file| asked.contains(file)),
        ),
        finding("DHCP", &format!("{} messages passed", outcome.traffic.dhcp), outcome.traffic.dhcp >= 4),
    ]
}

fn finding(what: &'static str, found: &str, holds: bool) -> Finding {
    Finding { what, found: found.to_owned(), holds }
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

fn answered_well(status_line: Option<&str>) -> bool {
    status_line.and_then(|line| line.split(' ').nth(1)).is_some_and(|status| status.starts_with('2'))
}

/// Prints findings and figures.
pub(super) fn print(subject: &Subject, outcome: &Outcome, findings: &[Finding]) {
    let report = &outcome.report;
    println!("\nguest {} ({}, {})", subject.hostname, report.package.replace('\t', " "), subject.mac);
    for Finding { what, found, holds } in findings {
        println!("  {} {what:<14} {found}", if *holds { "ok  " } else { "FAIL" });
    }
    println!("\ntime");
    let (wall, uptime) = (outcome.time.as_secs_f64(), report.uptime_seconds);
    println!(
        "  {wall:.1} s from power-on to report under {} ({uptime:.1} s by the guest)",
        outcome.accelerator
    );
    for (_, took, stage) in report.stages() {
        println!("  {took:>6.1} s  cloud-init {stage}");
    }
    println!("\nseed requests on the guest's wire");
    for exchange in &outcome.traffic.exchanges {
        let answer = exchange.answer.as_deref().unwrap_or("no answer");
        println!("  {:>8.2} ms  {}  →  {answer}", exchange.took.as_secs_f64() * 1e3, exchange.request);
    }
    let (connections, repeated) = (outcome.traffic.connections, outcome.traffic.repeated_syns);
    let address = own_address(&report.addresses);
    println!("  {connections} connections, {repeated} SYNs repeated, from {address}");
    println!("\nwhat the agent counted during the boot");
    for line in counted(outcome) {
        println!("  {line}");
    }
    let doubtful: Vec<_> = report.log.iter().filter(|l| l.contains("WARN") || l.contains("ERROR")).collect();
    if !doubtful.is_empty() {
        println!("\nwarnings of cloud-init");
        doubtful.iter().for_each(|line| println!("  {line}"));
    }
    println!("\nconsole, packet dump and logs: {}", outcome.directory.display());
}

/// The first address that is not the loopback's, in the output of `ip -brief address`.
fn own_address(text: &str) -> &str {
    let nic = text.lines().find(|line| !line.starts_with("lo "));
    nic.and_then(|line| line.split_whitespace().nth(2)).unwrap_or("no address")
}

/// The agent's counters that moved.
fn counted(outcome: &Outcome) -> Vec<String> {
    let (before, after) = &outcome.metrics;
    let moved = after.samples().iter().filter_map(|sample| {
        let same =
            |other: &&support::agent::Sample| other.name == sample.name && other.labels == sample.labels;
        let from = before.samples().iter().find(same).map_or(0.0, |old| old.value);
        let labels: Vec<_> = sample.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let grown = sample.value - from;
        (grown > 0.0).then(|| format!("{grown:>8}  {} {}", sample.name, labels.join(" ")))
    });
    moved.collect()
}

#[cfg(test)]
mod tests {
    use super::{GuestReport, answered_well};
    use std::time::Duration;

    fn report(log: &[&str]) -> GuestReport {
        let document = serde_json::json!({
            "uptime_seconds": 40.0, "package": "cloud-init\t22.4.2", "cloud_id": "nocloud",
            "result": {"v1": {"datasource": "DataSourceNoCloudNet", "errors": []}},
            "status": {"v1": {
                "stage": null,
                "modules-final": {"errors": [], "start": 30.0, "finished": 31.0},
                "init": {"errors": [], "start": 10.0, "finished": 12.5},
                "modules-init": {"errors": [], "start": null, "finished": null},
            }},
            "instance_id": "i", "hostname": "h", "authorized_keys": {}, "marker": null, "addresses": "",
            "log": log,
        });
        serde_json::from_value(document).expect("a report")
    }

    #[test]
    fn sleeps_between_retries_add_up_and_other_lines_do_not() {
        let quiet = report(&[
            "2026-01-01 00:00:00,000 - url_helper.py[DEBUG]: [0/11] open 'http://x/v1/meta-data' with {}",
            "2026-01-01 00:00:00,100 - url_helper.py[DEBUG]: Read from http://x/v1/meta-data (200, 9b) after 1 attempts",
        ]);
        assert_eq!(quiet.retry_sleep(), Duration::ZERO);
        let slow = report(&[
            "t - url_helper.py[DEBUG]: Please wait 1 seconds while we wait to try again",
            "t - url_helper.py[DEBUG]: Please wait 0.5 seconds while we wait to try again",
        ]);
        assert_eq!(slow.retry_sleep(), Duration::from_millis(1_500));
    }

    #[test]
    fn stages_come_in_the_order_they_began() {
        let report = report(&[]);
        let names: Vec<_> = report.stages().into_iter().map(|(_, took, name)| (name, took)).collect();
        assert_eq!(names, [("init", 2.5), ("modules-final", 1.0)]);
    }

    #[test]
    fn only_a_success_is_a_good_answer() {
        assert!(answered_well(Some("HTTP/1.1 200 OK")) && answered_well(Some("HTTP/1.1 204 No Content")));
        for bad in [None, Some("HTTP/1.1 404 Not Found"), Some(""), Some("HTTP/1.1")] {
            assert!(!answered_well(bad), "{bad:?}");
        }
    }
}

//! Prints a boot and its findings on the terminal.

use super::boot::Outcome;
use super::findings::Finding;
use super::subject::Subject;
use super::wire::Exchange;
use anyhow::{Context as _, Result};
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;
use support::agent::Sample;
use support::guest::METADATA;

/// The file beside the logs that lists each request.
const REQUESTS: &str = "requests.log";
/// The root of an EC2 tree. Below it each value is a document, too many to show.
const TREE: &str = "/meta-data/";

/// Prints the findings and figures of one boot, and writes all of its requests to a file beside its logs.
pub(super) fn boot(subject: &Subject, outcome: &Outcome, findings: &[Finding]) -> Result<()> {
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
    let all = exchanges.iter().fold(String::new(), |mut all, exchange| {
        // Writing to a string cannot fail.
        let _written = writeln!(all, "{:>9.3} s  {}", exchange.at.as_secs_f64(), line(exchange));
        all
    });
    let file = outcome.directory.join(REQUESTS);
    fs::write(&file, all).with_context(|| format!("cannot write {}", file.display()))
}

fn times(outcome: &Outcome) {
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
fn counted(outcome: &Outcome) -> Vec<String> {
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
pub(super) fn table(boots: &[(Subject, Outcome, Vec<Finding>)]) {
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
mod tests {
    use super::{Exchange, crawl, summary};
    use std::time::Duration;
    use support::guest::METADATA;

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

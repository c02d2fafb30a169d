//! Compares a boot with its record and its dialect.

use super::boot::Outcome;
use super::subject::Subject;
use super::wire::{Exchange, Traffic};
use std::collections::{BTreeMap, BTreeSet};

/// Messages of one DHCP exchange: discover, offer, request, acknowledge (RFC 2131, section 3.1).
const DHCP_EXCHANGE: usize = 4;

/// The most requests or warnings that a finding names. The output below it, or the logs, have all of them.
const NAMED: usize = 3;

/// One checked expectation.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) what: &'static str,
    pub(super) found: String,
    pub(super) holds: bool,
}

/// Checks a boot against all expectations.
pub(super) fn findings(subject: &Subject, outcome: &Outcome) -> Vec<Finding> {
    let (report, traffic) = (&outcome.report, &outcome.traffic);
    let expected = subject.dialect.expected();
    let datasource = report.datasource().unwrap_or("none: cloud-init wrote no result");
    let uuid = report.firmware.get("product_uuid").map_or("none", String::as_str);
    let errors = match report.errors() {
        Some(errors) => errors.join("; "),
        None => "unknown".to_owned(),
    };
    let unfinished = report.unfinished();
    let holders = report.authorized_keys.iter().filter(|(_, keys)| keys.contains(subject.ssh_key));
    let holders: Vec<_> = holders.map(|(path, _)| path.as_str()).collect();
    let marker = report.marker.as_deref().map_or("no effect", str::trim_end);
    let (warnings, _) = report.warnings();
    let mut findings = vec![
        finding("system UUID", uuid, uuid.eq_ignore_ascii_case(subject.uuid)),
        finding("datasource", datasource, datasource.starts_with(expected.datasource)),
        finding("cloud-id", or(&report.cloud_id, "none"), report.cloud_id == expected.cloud_id),
        finding("stages not done", or(&unfinished.join(", "), "none"), unfinished.is_empty()),
        finding("errors", or(&errors, "none"), errors.is_empty()),
        finding("warnings", &listed(warnings.len(), &warnings), warnings.is_empty()),
        finding("instance-id", &report.instance_id, report.instance_id == subject.instance_id()),
        finding("hostname", &report.hostname, report.hostname == subject.hostname),
        finding("ssh key in", or(&holders.join(", "), "no file"), !holders.is_empty()),
        finding("user-data", marker, marker == subject.marker),
        network(subject, outcome),
        requests(traffic, expected.asked),
        retries(outcome, expected.twice),
        finding(
            "DHCP",
            &format!("{} messages passed, {} before the first request", traffic.dhcp, traffic.dhcp_before),
            traffic.dhcp_before >= DHCP_EXCHANGE,
        ),
    ];
    findings.extend(expected.token.map(|token| token_stays(&traffic.exchanges, token)));
    findings
}

/// Checks the hop limits. An answer with a token has the record's hop limit, which is 1, so that a router behind the
/// guest drops it. Other answers have an ordinary hop limit.
fn token_stays(exchanges: &[Exchange], token: &str) -> Finding {
    let (tokens, others): (Vec<_>, Vec<_>) = exchanges.iter().partition(|one| one.request == token);
    let least = |exchanges: &[&Exchange]| exchanges.iter().map(|one| one.hops).min().unwrap_or_default();
    let most = tokens.iter().map(|one| one.hops).max().unwrap_or_default();
    let (own, other) = (least(&tokens), least(&others));
    let found = format!("{own} with the token, at least {other} without");
    finding("hop limit", &found, own == 1 && most == 1 && other > 1)
}

/// Checks the address and the source of its configuration.
fn network(subject: &Subject, outcome: &Outcome) -> Finding {
    let expected = subject.dialect.expected().network.word();
    let (address, source) = (outcome.report.address(), outcome.report.network_source());
    let shown = address.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let holds = address == Some(subject.address()) && source == Some(expected);
    let found = format!("{shown}, configured from {}", source.unwrap_or("no source"));
    let wanted = format!("; expected {} from {expected}", subject.address());
    finding("network", &format!("{found}{}", if holds { "" } else { &wanted }), holds)
}

/// Checks that all expected requests were made, and that all requests succeeded. The record has every document.
fn requests(traffic: &Traffic, asked: &[&str]) -> Finding {
    let refused: Vec<_> = traffic.exchanges.iter().filter(|exchange| !exchange.answered_well()).collect();
    let refused: Vec<_> = refused.iter().map(|exchange| exchange.request.as_str()).collect();
    let made = |request: &&str| traffic.exchanges.iter().any(|exchange| exchange.request == *request);
    let missed: Vec<_> = asked.iter().copied().filter(|request| !made(request)).collect();
    let found = format!(
        "{} made, {} without a good answer, {} expected and not made",
        traffic.exchanges.len(),
        listed(refused.len(), &refused),
        listed(missed.len(), &missed),
    );
    finding("requests", &found, refused.is_empty() && missed.is_empty())
}

/// Checks that cloud-init neither slept nor repeated a request.
fn retries(outcome: &Outcome, twice: &[&str]) -> Finding {
    let (sleep, attempts) = (outcome.report.retry_sleep(), outcome.report.further_attempts());
    let again = asked_again(&outcome.traffic.exchanges, twice);
    let found = format!(
        "{} s slept, {attempts} further attempts, {} repeated requests",
        sleep.as_secs_f64(),
        listed(again.len(), &again)
    );
    finding("retries", &found, sleep.is_zero() && attempts == 0 && again.is_empty())
}

/// Returns the requests that were made more often than cloud-init makes them by itself.
fn asked_again<'a>(exchanges: &'a [Exchange], twice: &[&str]) -> Vec<&'a str> {
    let mut times = BTreeMap::<_, usize>::new();
    for exchange in exchanges {
        *times.entry(exchange.request.as_str()).or_default() += 1;
    }
    let allowed = |request: &str| if twice.contains(&request) { 2 } else { 1 };
    times
        .into_iter()
        .filter(|(request, times)| *times > allowed(request))
        .map(|(request, _)| request)
        .collect()
}

impl Exchange {
    /// Whether the answer's status is a success.
    pub(super) fn answered_well(&self) -> bool {
        let status = self.answer.as_deref().and_then(|line| line.split(' ').nth(1));
        status.is_some_and(|status| status.starts_with('2'))
    }
}

pub(super) fn finding(what: &'static str, found: &str, holds: bool) -> Finding {
    Finding { what, found: found.to_owned(), holds }
}

/// Formats a number with the first few names that it counts, each once.
fn listed(count: usize, what: &[&str]) -> String {
    let mut different: Vec<_> = what.to_vec();
    let mut seen = BTreeSet::new();
    different.retain(|name| seen.insert(*name));
    match different.get(..NAMED) {
        _ if different.is_empty() => count.to_string(),
        Some(first) if different.len() > NAMED => format!("{count} ({}, …)", first.join(", ")),
        _ => format!("{count} ({})", different.join(", ")),
    }
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

#[cfg(test)]
mod tests {
    use super::{Exchange, Traffic, asked_again, listed, requests, token_stays};
    use std::net::Ipv4Addr;
    use std::time::Duration;

    fn exchange(request: &str, answer: Option<&str>) -> Exchange {
        Exchange {
            request: request.to_owned(),
            server: Ipv4Addr::LOCALHOST.into(),
            answer: answer.map(str::to_owned),
            at: Duration::ZERO,
            took: Duration::ZERO,
            hops: 64,
        }
    }

    #[test]
    fn only_a_success_is_a_good_answer() {
        for good in ["HTTP/1.1 200 OK", "HTTP/1.1 204 No Content"] {
            assert!(exchange("GET /", Some(good)).answered_well(), "{good}");
        }
        for bad in [None, Some("HTTP/1.1 404 Not Found"), Some(""), Some("HTTP/1.1")] {
            assert!(!exchange("GET /", bad).answered_well(), "{bad:?}");
        }
    }

    #[test]
    fn a_request_made_more_often_than_expected_is_a_retry() {
        let requests = ["GET /openstack", "GET /a", "GET /openstack", "GET /b"];
        let exchanges: Vec<_> = requests.iter().map(|request| exchange(request, None)).collect();
        assert!(asked_again(&exchanges, &["GET /openstack"]).is_empty());
        assert_eq!(asked_again(&exchanges, &["GET /a"]), ["GET /openstack"]);
        let thrice = [exchanges.clone(), exchanges].concat();
        assert_eq!(asked_again(&thrice, &["GET /openstack", "GET /a"]), ["GET /b", "GET /openstack"]);
    }

    #[test]
    fn only_the_answer_with_the_token_has_hop_limit_1() {
        let answered = |request, hops| Exchange { hops, ..exchange(request, Some("HTTP/1.1 200 OK")) };
        let cases = [(1, 64, true), (64, 64, false), (1, 1, false), (0, 64, false)];
        for (token, other, holds) in cases {
            let exchanges = [answered("PUT /t", token), answered("GET /a", other), answered("GET /b", 64)];
            assert_eq!(token_stays(&exchanges, "PUT /t").holds, holds, "{token} {other}");
        }
        assert!(!token_stays(&[answered("GET /a", 64)], "PUT /t").holds);
    }

    #[test]
    fn a_finding_names_a_few_requests_each_once() {
        assert_eq!(listed(0, &[]), "0");
        assert_eq!(listed(3, &["a", "b", "a"]), "3 (a, b)");
        assert_eq!(listed(5, &["a", "b", "c", "d", "a"]), "5 (a, b, c, …)");
    }

    #[test]
    fn a_refused_or_missing_request_is_named() {
        let ok = Some("HTTP/1.1 200 OK");
        let exchanges = vec![exchange("GET /a", ok), exchange("GET /b", Some("HTTP/1.1 404 Not Found"))];
        let traffic = Traffic { exchanges, ..Traffic::default() };
        let found = requests(&traffic, &["GET /a", "GET /c"]);
        assert_eq!(
            (found.holds, found.found.as_str()),
            (false, "2 made, 1 (GET /b) without a good answer, 1 (GET /c) expected and not made")
        );
        let traffic = Traffic { exchanges: vec![exchange("GET /a", ok)], ..Traffic::default() };
        assert!(requests(&traffic, &["GET /a"]).holds);
    }
}

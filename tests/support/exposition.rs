//! A strict parser of the Prometheus text format, version 0.0.4. It rejects mistakes that scrapers tolerate.

use anyhow::{Context as _, Result, bail, ensure};
use metadata_common::verdict::Verdict;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use crate::agent::{Agent, Metrics};
use crate::eventually;

/// Name, labels and value of a sample. The name is that of the family; for a histogram, with a suffix.
pub type Sample = (String, BTreeMap<String, String>, f64);

/// A family of samples.
#[derive(Clone, Debug, Default)]
pub struct Family {
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    /// The help text.
    pub help: String,
    /// Its samples.
    pub samples: Vec<Sample>,
}

/// Labels that would identify a guest. A node has thousands of guests, so these are forbidden.
const OF_A_GUEST: [&str; 7] = ["vm", "vm_name", "name", "uuid", "mac", "port", "client"];
/// Units that are not base units.
const NOT_BASE: [&str; 6] = ["_ms", "_us", "_ns", "_milliseconds", "_kb", "_percent"];

/// Parses a whole exposition.
///
/// # Errors
/// The first line that breaks a rule, and the rule.
pub fn read(text: &str) -> Result<BTreeMap<String, Family>> {
    ensure!(text.ends_with('\n'), "the last line has no line feed");
    let mut families = BTreeMap::new();
    let mut series = HashSet::new();
    let mut current: Option<(String, Family)> = None;
    for line in text.lines() {
        let read = line_of(line, &mut current, &mut families, &mut series);
        read.with_context(|| format!("in `{line}`"))?;
    }
    finish(current, &mut families)?;
    Ok(families)
}

fn line_of(
    line: &str,
    current: &mut Option<(String, Family)>,
    families: &mut BTreeMap<String, Family>,
    series: &mut HashSet<String>,
) -> Result<()> {
    if let Some(rest) = line.strip_prefix("# HELP ") {
        let (name, help) = rest.split_once(' ').context("a help without a text")?;
        ensure!(is_name(name) && !help.trim().is_empty(), "no name or no text");
        finish(current.take(), families)?;
        ensure!(!families.contains_key(name), "a family twice");
        *current = Some((name.to_owned(), Family { help: help.to_owned(), ..Family::default() }));
        return Ok(());
    }
    let (family, read) = current.as_mut().context("a sample before any family")?;
    if let Some(rest) = line.strip_prefix("# TYPE ") {
        let (name, kind) = rest.split_once(' ').context("a type without a kind")?;
        ensure!(name == family, "the type of another family");
        ensure!(read.kind.is_empty() && read.samples.is_empty(), "a second type, or a type after samples");
        ensure!(["counter", "gauge", "histogram"].contains(&kind), "kind {kind}");
        ensure!((kind == "counter") == name.ends_with("_total"), "counters, and no others, end in _total");
        ensure!(!NOT_BASE.iter().any(|unit| name.contains(unit)), "a unit that is not a base unit");
        read.kind = kind.to_owned();
        return Ok(());
    }
    ensure!(!read.kind.is_empty() && !line.starts_with('#'), "neither help, type nor sample of a known kind");
    let (name, labels, value) = sample(line)?;
    let suffix = name.strip_prefix(family.as_str()).context("a sample of another family")?;
    let suffixes: &[&str] = if read.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
    ensure!(suffixes.contains(&suffix), "suffix {suffix}");
    ensure!(read.kind == "gauge" || value >= 0.0, "a negative count");
    for label in labels.keys() {
        ensure!(!OF_A_GUEST.contains(&label.as_str()), "label {label} names a guest");
    }
    ensure!(series.insert(format!("{name}{labels:?}")), "a series twice");
    read.samples.push((name, labels, value));
    Ok(())
}

fn finish(done: Option<(String, Family)>, families: &mut BTreeMap<String, Family>) -> Result<()> {
    let Some((name, family)) = done else { return Ok(()) };
    ensure!(!family.samples.is_empty(), "{name} has no sample");
    if family.kind == "histogram" {
        histogram(&name, &family.samples).with_context(|| name.clone())?;
    }
    let labels: BTreeSet<Vec<&String>> =
        family.samples.iter().map(|(_, labels, _)| labels.keys().collect()).collect();
    ensure!(family.kind == "histogram" || labels.len() == 1, "{name} has samples with different labels");
    families.insert(name, family);
    Ok(())
}

fn histogram(name: &str, samples: &[Sample]) -> Result<()> {
    let (mut last, mut before) = (f64::NEG_INFINITY, 0.0);
    let buckets = samples.iter().filter(|(sample, ..)| sample.ends_with("_bucket"));
    for (_, labels, value) in buckets {
        let bound: f64 =
            labels.get("le").context("a bucket without bound")?.replace("+Inf", "inf").parse()?;
        ensure!(bound > last && *value >= before, "buckets out of order at {bound}");
        (last, before) = (bound, *value);
    }
    ensure!(last.is_infinite(), "no last bucket");
    let of = |suffix: &str| samples.iter().find(|(sample, ..)| *sample == format!("{name}{suffix}"));
    let (_, _, count) = of("_count").context("no count")?;
    ensure!(*count == before && of("_sum").is_some(), "count {count}, last bucket {before}, or no sum");
    Ok(())
}

fn is_name(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn sample(line: &str) -> Result<Sample> {
    let end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name), "name {name}");
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, quoted) = rest.split_once("=\"").context("no label")?;
            ensure!(is_name(label), "label {label}");
            let (value, behind) = unquoted(quoted)?;
            ensure!(labels.insert(label.to_owned(), value).is_none(), "label {label} twice");
            match behind.strip_prefix(',') {
                Some(more) => rest = more,
                None => break rest = behind.strip_prefix('}').context("no closing brace")?,
            }
        }
    }
    let value = rest.strip_prefix(' ').context("no blank before the value")?;
    let value: f64 = value.parse()?;
    ensure!(value.is_finite(), "value {value}");
    Ok((name.to_owned(), labels, value))
}

/// A label's value up to its closing quote, and the rest of the line.
fn unquoted(text: &str) -> Result<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, c @ ('\\' | '"'))) => value.push(c),
                other => bail!("escape {other:?}"),
            },
            c => value.push(c),
        }
    }
    bail!("no closing quote")
}

/// The sum of a family's samples that have these labels.
///
/// # Errors
/// When there is no such family. A renamed family therefore does not count as zero.
pub fn sum(families: &BTreeMap<String, Family>, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
    let family = families.get(name).with_context(|| format!("no family {name}"))?;
    let wanted = |sample: &&Sample| {
        labels.iter().all(|(label, value)| sample.1.get(*label).is_some_and(|found| found == value))
    };
    let counts = family.samples.iter().filter(wanted);
    Ok(match family.kind.as_str() {
        "histogram" => counts.filter(|(name, ..)| name.ends_with("_count")).map(|(.., value)| value).sum(),
        _ => counts.map(|(.., value)| value).sum(),
    })
}

// The difference between two readings of an agent's counters, and whether the counters balance.

/// Limit for frames in transit, and for workers to publish their counters.
const SETTLED: Duration = Duration::from_secs(10);
/// Prefixes of the verdicts of the programs after `port`. These programs count the same frame again.
const BEHIND: [&str; 3] = ["socket_", "ring_", "hub_"];

/// Frames by verdict of `port`.
pub type Counts = BTreeMap<&'static str, u64>;

/// The current counters of the verdicts of `port`.
///
/// # Errors
/// When the agent's metrics are not available.
pub fn verdicts(agent: &Agent<'_>) -> Result<Counts> {
    let metrics = agent.metrics()?;
    let known = Verdict::ALL.iter().map(|verdict| verdict.name());
    Ok(known
        .filter(|name| !BEHIND.iter().any(|behind| name.starts_with(behind)))
        .map(|name| (name, metrics.verdicts().find(|(found, _)| *found == name).map_or(0, |(_, n)| n)))
        .collect())
}

/// The difference between two readings, without the counters that did not change.
#[must_use]
pub fn since(before: &Counts, after: &Counts) -> Counts {
    let more = after.iter().map(|(name, frames)| (*name, frames - before.get(name).copied().unwrap_or(0)));
    more.filter(|(_, frames)| *frames != 0).collect()
}

/// The sum of a counter over all hubs; 0 if the counter does not exist yet.
#[must_use]
pub fn total(metrics: &Metrics, name: &str, label: Option<(&str, &str)>) -> u64 {
    let of = metrics.samples().iter().filter(|sample| {
        sample.name == name && label.is_none_or(|(key, value)| sample.label(key) == Some(value))
    });
    of.map(|sample| sample.value as u64).sum()
}

/// Checks that the counters account for every frame. A frame that `port` steered reached a socket or a ring, and then a
/// stack or a loss counter. A frame that the stack sent reached a guest or a loss counter. `more` is added to
/// the steered frames: the kernel segments large frames, and drops steered frames that are too long for the hub.
///
/// # Errors
/// The first sum that does not balance after the frames in transit had time to arrive.
pub fn balance(agent: &Agent<'_>, more: i64) -> Result<()> {
    eventually(SETTLED, || {
        let metrics = agent.metrics()?;
        let verdict = |name: &str| metrics.frames(name).unwrap_or(0);
        let lost = |name: &str, reasons: &[&str]| -> u64 {
            reasons.iter().map(|reason| total(&metrics, name, Some(("reason", reason)))).sum()
        };
        let (receive, send) = ("xdp_imds_receive_lost_frames_total", "xdp_imds_send_lost_frames_total");
        let received = total(&metrics, "xdp_imds_received_frames_total", None);
        let stack = total(&metrics, "xdp_imds_stack_received_total", None);
        let at_link = lost(receive, &["runt", "unstamped", "slot_out_of_range", "over_share"]);
        let at_socket = lost(receive, &["ring_full", "dropped"]);
        let sent = total(&metrics, "xdp_imds_sent_frames_total", None);
        let unsent = lost(send, &["full", "no_memory", "down", "bad_length", "other"]);
        let taken = verdict("socket_delivered") + verdict("ring_delivered");
        let accounts = [
            (
                "steered = at the socket or in the ring",
                verdict("steer_").saturating_add_signed(more),
                taken + verdict("socket_drop_") + verdict("ring_drop_") + lost(receive, &["veth_full"]),
            ),
            ("at the socket or in the ring = received + lost", taken, received + at_socket),
            ("received = to the stack + refused", received, stack + at_link),
            (
                "by the stack = to the tap + lost",
                total(&metrics, "xdp_imds_stack_sent_total", None),
                sent + unsent,
            ),
            ("to the tap = to guests + dropped", sent, verdict("hub_")),
        ];
        for (account, left, right) in accounts {
            ensure!(left == right, "{account}: {left} frames against {right}");
        }
        for fault in ["xdp_imds_stack_faults_total", "xdp_imds_fill_ring_invalid_total"] {
            ensure!(total(&metrics, fault, None) == 0, "{fault} is not 0");
        }
        Ok(())
    })
    .with_context(|| format!("the agent's log:\n{}", agent.log()))
}

#[cfg(test)]
mod tests {
    use super::{read, sum};

    #[test]
    fn a_good_exposition_is_read() {
        let text = "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1\",y=\"q\\\"\\\\\\n\"} 3\na_total{x=\"2\",y=\"\"} 4\n\
                    # HELP h Times.\n# TYPE h histogram\nh_bucket{le=\"0.1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3.5\nh_count 2\n";
        let families = read(text).expect("a good one");
        assert_eq!(sum(&families, "a_total", &[]).expect("there"), 7.0);
        assert_eq!(sum(&families, "a_total", &[("x", "2")]).expect("there"), 4.0);
        assert_eq!(sum(&families, "h", &[]).expect("there"), 2.0);
        assert!(sum(&families, "b_total", &[]).is_err());
    }

    #[test]
    fn an_exposition_that_breaks_a_rule_is_refused() {
        let gauge = |rest: &str| format!("# HELP g G.\n# TYPE g gauge\n{rest}");
        for text in [
            gauge("g 1"),
            gauge("g one\n"),
            gauge("g NaN\n"),
            gauge("g 1\ng 1\n"),
            gauge("g{a=\"1\"} 1\ng{b=\"1\"} 1\n"),
            gauge("g{vm=\"web\"} 1\n"),
            gauge("g{a=\"1} 1\n"),
            gauge("g{a=\"\\x\"} 1\n"),
            gauge("h 1\n"),
            gauge("g_sum 1\n"),
            gauge(""),
            gauge("g 1\n# HELP g G.\n"),
            "g 1\n".into(),
            "# TYPE g gauge\ng 1\n".into(),
            "# HELP g G.\n# TYPE g counter\ng 1\n".into(),
            "# HELP g_total G.\n# TYPE g_total gauge\ng_total 1\n".into(),
            "# HELP g_ms G.\n# TYPE g_ms gauge\ng_ms 1\n".into(),
            "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 2\nh_sum 1\nh_count 3\n".into(),
            "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"2\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n".into(),
        ] {
            assert!(read(&text).is_err(), "accepted:\n{text}");
        }
    }
}

//! The result of a demo, as tables and as JSON.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Duration;
use testbed::agent::{DROPPED, IMPOSTOR, PASSED, STEERED};
use testbed::netns::Namespace;
use testbed::record::Identity;

/// What a demo measured.
pub(crate) struct Report {
    pub(crate) asked: Vec<Asked>,
    /// Whether the impostor's requests timed out.
    pub(crate) refused: bool,
    /// Frames by the kernel's verdict.
    pub(crate) verdicts: Vec<(String, u64)>,
    pub(crate) pings: Pings,
    pub(crate) links: Vec<Link>,
    /// Whether an XDP program was still attached to a tap after the agent stopped.
    pub(crate) program_left: bool,
}

/// The result of one guest.
pub(crate) struct Asked {
    pub(crate) guest: Identity,
    /// Bytes of all bodies together.
    pub(crate) bytes: usize,
    /// Time of all requests together, with connection set-up.
    pub(crate) time: Duration,
    pub(crate) error: Option<String>,
}

/// Pings among guests and the gateway, which the agent must not affect.
pub(crate) struct Pings {
    pub(crate) sent: u32,
    pub(crate) answered: u32,
}

/// The counters of one tap.
pub(crate) struct Link {
    name: String,
    received: u64,
    sent: u64,
    errors: u64,
}

impl Link {
    /// Reads the counters of `name` with `ip -s link`.
    pub(crate) fn read(ns: &Namespace, name: &str) -> Result<Self> {
        let shown: Value = serde_json::from_str(&ns.ip(&format!("-j -s link show dev {name}"))?)?;
        let stats = &shown[0]["stats64"];
        let count = |way: &str, what: &str| {
            stats[way][what]
                .as_u64()
                .with_context(|| format!("`ip -j -s link` shows no {way} {what} of {name}"))
        };
        Ok(Self {
            name: name.to_owned(),
            received: count("rx", "packets")?,
            sent: count("tx", "packets")?,
            errors: count("rx", "errors")? + count("tx", "errors")?,
        })
    }
}

impl Report {
    fn frames(&self, beginning: &str) -> u64 {
        self.verdicts.iter().filter(|(name, _)| name.starts_with(beginning)).map(|(_, frames)| frames).sum()
    }

    /// One sentence for each expectation that was not met; empty after a good demo.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let mut wrong: Vec<String> = self.asked.iter().filter_map(|asked| asked.error.clone()).collect();
        if !self.refused {
            wrong.push("the impostor was answered".into());
        }
        if self.frames(IMPOSTOR) == 0 {
            wrong.push(format!("the impostor's frames are not counted as {IMPOSTOR}"));
        }
        if self.frames(STEERED) == 0 || self.frames(PASSED) == 0 {
            wrong.push(
                "the kernel counted no steered or no passed frames, so its programs did not see the traffic"
                    .into(),
            );
        }
        if self.pings.answered != self.pings.sent {
            wrong.push(format!("{} of {} pings were answered", self.pings.answered, self.pings.sent));
        }
        for link in self.links.iter().filter(|link| link.errors > 0) {
            wrong.push(format!("{} has {} errors", link.name, link.errors));
        }
        if self.program_left {
            wrong.push("an XDP program stayed on a tap after the agent stopped".into());
        }
        wrong
    }

    /// The result as tables for people.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("writing to a String cannot fail");
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\n{:<10} {:<36} {:>9} {:>7} {:>7}  ",
            "guest", "instance-id", "user-data", "bytes", "ms"
        )?;
        for Asked { guest, bytes, time, error } in &self.asked {
            let ms = time.as_secs_f64() * 1_000.0;
            let verdict = error.as_deref().unwrap_or("ok");
            let (name, id, data) = (&guest.hostname, &guest.instance_id, guest.user_data.len());
            writeln!(out, "{name:<10} {id:<36} {data:>9} {bytes:>7} {ms:>7.1}  {verdict}")?;
        }
        let impostor = if self.refused { "got nothing" } else { "WAS ANSWERED" };
        writeln!(out, "{:<10} {impostor}", "impostor")?;

        writeln!(out, "\n{:<28} {:>9}", "the kernel's verdicts", "frames")?;
        for (name, frames) in self.verdicts.iter().filter(|(_, frames)| *frames > 0) {
            writeln!(out, "  {name:<26} {frames:>9}")?;
        }
        for (what, beginning) in [("steered", STEERED), ("dropped", DROPPED), ("passed", PASSED)] {
            writeln!(out, "{what:<28} {:>9}", self.frames(beginning))?;
        }

        writeln!(out, "\nother traffic: {} of {} pings answered", self.pings.answered, self.pings.sent)?;
        for Link { name, received, sent, errors } in &self.links {
            writeln!(out, "  {name:<10} received {received:>6}  sent {sent:>6}  errors {errors}")?;
        }
        writeln!(out)
    }

    /// The result as JSON for programs.
    pub(crate) fn json(&self) -> Value {
        let asked = |asked: &Asked| {
            json!({
                "hostname": asked.guest.hostname,
                "instance_id": asked.guest.instance_id,
                "user_data_bytes": asked.guest.user_data.len(),
                "bytes": asked.bytes,
                "ms": asked.time.as_secs_f64() * 1_000.0,
                "error": asked.error,
            })
        };
        let link = |link: &Link| json!({"name": link.name, "received": link.received, "sent": link.sent, "errors": link.errors});
        json!({
            "guests": self.asked.iter().map(asked).collect::<Vec<_>>(),
            "impostor_refused": self.refused,
            "verdicts": self.verdicts.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "pings": {"sent": self.pings.sent, "answered": self.pings.answered},
            "links": self.links.iter().map(link).collect::<Vec<_>>(),
            "program_left": self.program_left,
            "wrong": self.wrong(),
        })
    }
}

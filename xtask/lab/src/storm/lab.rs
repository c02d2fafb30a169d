//! The place of a storm: a namespace, and the generator process that holds its taps.

use anyhow::{Context as _, Result, bail, ensure};
use std::fmt;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use support::netns::Namespace;

use super::guest::{Command as Order, Orders, Outcome, Prices, Reply, TAP_GROUP, Wires};
use super::model::Disturbed;
use super::peer::{Disturbance, Running};

/// A node with taps, and the generator of its guests.
pub(super) struct Lab {
    generator: Child,
    orders: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
    /// Dropped last, because the taps are in it.
    node: Namespace,
}

impl Lab {
    /// Makes the namespace and the taps.
    pub(super) fn new(generator: &Path, taps: usize, wires: Wires, cpu: Option<usize>) -> Result<Self> {
        let node = Namespace::new("storm")?;
        // Without IPv6 the node itself sends no frames on the taps.
        node.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut command = Command::new(generator);
        command.args(["storm-guests", node.name(), &taps.to_string()]);
        match wires {
            Wires::Plain => {}
            Wires::VirtioHeader => drop(command.arg("--vnet-hdr")),
            Wires::VhostNet => drop(command.arg("--vhost")),
        }
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut generator =
            command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let orders = generator.stdin.take();
        let replies = BufReader::new(generator.stdout.take().context("standard output is not piped")?);
        let mut lab = Self { generator, orders, replies, node };
        lab.expect_done()?;
        Ok(lab)
    }

    /// Returns the node's namespace.
    pub(super) fn node(&self) -> &Namespace {
        &self.node
    }

    /// Returns the generator's process id.
    pub(super) fn pid(&self) -> u32 {
        self.generator.id()
    }

    /// Loads a plan into the generator.
    pub(super) fn load(&mut self, plan: &Path) -> Result<()> {
        self.order(&Order::Load(plan.to_owned()))?;
        self.expect_done()
    }

    /// Measures the prices of the generator's system calls. No server may run.
    pub(super) fn prices(&mut self) -> Result<Prices> {
        self.order(&Order::Price)?;
        match self.reply()? {
            Reply::Priced(prices) => Ok(prices),
            other => bail!("expected prices, found the reply {other:?}"),
        }
    }

    /// Runs a storm. `report` gets the numbers of finished boots and of failures; its error ends the generator.
    pub(super) fn storm(
        &mut self,
        orders: &Orders,
        report: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Outcome> {
        self.order(&Order::Storm(orders.clone()))?;
        loop {
            match self.reply()? {
                Reply::Progress { boots, failures } => {
                    if let Err(error) = report(boots, failures) {
                        self.generator.kill()?;
                        return Err(error);
                    }
                }
                Reply::Stormed(outcome) => return Ok(*outcome),
                other => bail!("expected an outcome, found the reply {other:?}"),
            }
        }
    }

    fn order(&mut self, order: &Order) -> Result<()> {
        let orders = self.orders.as_mut().context("the generator's input is closed")?;
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        orders.write_all(&line).context("the generator has ended; its messages are above")
    }

    fn reply(&mut self) -> Result<Reply> {
        let mut line = String::new();
        ensure!(
            self.replies.read_line(&mut line)? > 0,
            "the generator has ended ({}); its messages are above",
            self.generator.wait()?
        );
        serde_json::from_str(&line)
            .with_context(|| format!("cannot parse the generator's reply {}", line.trim()))
    }

    fn expect_done(&mut self) -> Result<()> {
        match self.reply()? {
            Reply::Done => Ok(()),
            other => bail!("expected the end of an order, found the reply {other:?}"),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // All taps are deleted in one step, before their descriptors close one by one.
        if let Err(error) = self.node.ip(&format!("link del group {TAP_GROUP}")) {
            eprintln!("cannot delete the taps of {} in one step: {error:#}", self.node.name());
        }
        drop(self.orders.take());
        if let Err(error) = self.generator.wait() {
            eprintln!("cannot end generator {}: {error}", self.generator.id());
        }
    }
}

// Events that disturb the agent in the middle of a storm, and their durations.

/// How often a guest repeats a failed request, a second apart, if the storm has events or the node signs the answers.
/// cloud-init's clients repeat at least as often.
pub(super) const RETRIES: u8 = 5;

/// A disturbance, and its time since the start of a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Event {
    what: Disturbance,
    after: Duration,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.what {
            Disturbance::Kill9 => "kill9",
            Disturbance::TakeOver => "takeover",
        };
        write!(f, "{name}@{}", self.after.as_secs_f64())
    }
}

/// Parses `kill9@SECONDS` or `takeover@SECONDS`.
pub(super) fn read(text: &str) -> Result<Event, String> {
    let parts = text.split_once('@').and_then(|(name, seconds)| {
        let what = match name {
            "kill9" => Disturbance::Kill9,
            "takeover" => Disturbance::TakeOver,
            _ => return None,
        };
        let after = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(Event { what, after })
    });
    parts.ok_or_else(|| "expected kill9@SECONDS or takeover@SECONDS".into())
}

/// Formats all events as on the command line.
pub(super) fn shown(events: &[Event]) -> String {
    events.iter().map(Event::to_string).collect::<Vec<_>>().join(",")
}

/// Causes each event when it is due, until the storm is over. Dropping the other end of `over` ends the storm.
pub(super) fn all(
    running: &mut dyn Running,
    events: &[Event],
    over: &Receiver<()>,
) -> Result<Vec<Disturbed>> {
    let began = Instant::now();
    let mut done = Vec::new();
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.after);
    for event in events {
        match over.recv_timeout(event.after.saturating_sub(began.elapsed())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
        let started = Instant::now();
        running.disturb(event.what).with_context(|| event.to_string())?;
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        done.push(Disturbed { event: event.to_string(), took_us });
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use std::sync::mpsc::{Sender, channel};

    use super::{all, read, shown};
    use crate::storm::peer::{Disturbance, Running};

    /// Records its disturbances. A takeover ends the storm.
    struct Noted(Vec<Disturbance>, Option<Sender<()>>);

    impl Running for Noted {
        fn pids(&self) -> Vec<u32> {
            Vec::new()
        }

        fn disturb(&mut self, what: Disturbance) -> Result<()> {
            self.0.push(what);
            self.1.take_if(|_| what == Disturbance::TakeOver);
            Ok(())
        }

        fn stop(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_shown_as_it_was_given() {
        for text in ["kill9@0.5", "takeover@2"] {
            assert_eq!(read(text).map(|event| event.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "kill9", "kill9@", "kill9@-1", "kill9@nan", "reboot@1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn events_are_sorted_by_time_and_none_follows_the_end() {
        let events = ["takeover@0.02", "kill9@0", "kill9@3600"].map(|text| read(text).expect("an event"));
        assert_eq!(shown(&events), "takeover@0.02,kill9@0,kill9@3600");
        let (over, end) = channel::<()>();
        let mut running = Noted(Vec::new(), Some(over));
        let done = all(&mut running, &events, &end).expect("all done");
        assert_eq!(running.0, [Disturbance::Kill9, Disturbance::TakeOver]);
        assert_eq!(
            done.iter().map(|done| done.event.as_str()).collect::<Vec<_>>(),
            ["kill9@0", "takeover@0.02"]
        );
    }
}

//! The place of a storm: a namespace, and the generator process that holds its taps.

use super::guest::{Command as Order, Orders, Outcome, Prices, Reply, TAP_GROUP, Wires};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use support::netns::Namespace;

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

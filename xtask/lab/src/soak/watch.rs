//! Samples everything that could leak.

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use std::time::{Duration, Instant};
use support::agent::{Agent, Metrics};
use support::netns::Namespace;
use support::objects::Objects;

/// The prefix of the names of the hubs' inner ends.
const INNER: &str = "imds-i";
/// The prefix of the names of all hub devices.
const HUB: &str = "imds-";
/// The longest time until frames under way have arrived, counters are published, and objects that the kernel frees
/// later (RCU, workqueues, a closed AF_XDP socket) have disappeared.
const SETTLE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// The values found while no guest sends.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sample {
    /// Seconds since the start of the soak.
    pub(super) at_s: f64,
    /// The agent's resident memory without mapped files, in bytes.
    pub(super) rss_bytes: u64,
    /// Descriptors except those of eBPF objects.
    pub(super) fds: u64,
    pub(super) threads: u64,
    /// Network namespaces that the agent holds by descriptors.
    pub(super) namespaces: u64,
    pub(super) programs: u64,
    pub(super) maps: u64,
    pub(super) links: u64,
    /// Links of the agent that are on no device, or on a device with another link of the same program.
    pub(super) idle_links: u64,
    /// Objects that any agent of this soak held, that the current one does not hold, and that are still in the kernel.
    pub(super) orphans: u64,
    pub(super) hub_devices: u64,
    pub(super) ports: u64,
    pub(super) identities: u64,
    pub(super) records: u64,
    pub(super) connections: u64,
    /// Frames received so far, and frames that no counter accounts for.
    pub(super) frames: u64,
    pub(super) unaccounted: u64,
}

/// Reads one value of a sample.
pub(super) type Figure = fn(&Sample) -> u64;

/// Takes samples, and remembers the objects that agents have held.
pub(super) struct Watch {
    began: Instant,
    ever: Objects,
    /// The process id of the current agent and the counters at its first sample. Pinned maps may hold counts of earlier
    /// agents.
    first: Option<(u32, Ledger)>,
}

impl Watch {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, ever: Objects::default(), first: None }
    }

    /// Records the objects that the agent holds, so that later calls can check that they disappear.
    pub(super) fn note(&mut self, pid: u32) -> Result<Objects> {
        let held = Objects::held_by(pid)?;
        self.ever.add(&held);
        Ok(held)
    }

    /// Returns objects that agents held and that stay in the kernel after [`SETTLE`]. `holder` is the running agent.
    pub(super) fn orphans(&mut self, holder: Option<u32>) -> Result<Objects> {
        let end = Instant::now() + SETTLE;
        loop {
            let held = holder.map_or_else(|| Ok(Objects::default()), |pid| self.note(pid))?;
            let remaining = self.ever.without(&held).among(&Objects::in_kernel());
            if remaining.is_empty() || Instant::now() >= end {
                // Objects that have disappeared need not be remembered.
                self.ever = held;
                self.ever.add(&remaining);
                return Ok(remaining);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes a complete sample. The caller has paused all guests.
    pub(super) fn sample(&mut self, agent: &Agent<'_>, node: &Namespace) -> Result<Sample> {
        let pid = agent.pid();
        let first = self.first.filter(|(of, _)| *of == pid).map(|(_, first)| first);
        let (metrics, ledger, unaccounted) = settled(agent, node, first)?;
        if first.is_none() {
            self.first = Some((pid, ledger));
        }
        let orphans = self.orphans(Some(pid))?;
        let held = self.note(pid)?;
        let gauge = |name: &str| value(&metrics, name);
        let (fds, namespaces) = descriptors(pid)?;
        Ok(Sample {
            at_s: self.began.elapsed().as_secs_f64(),
            rss_bytes: resident(pid)?,
            fds,
            threads: count(&format!("/proc/{pid}/task"))?,
            namespaces,
            programs: held.programs.len() as u64,
            maps: held.maps.len() as u64,
            links: held.links.len() as u64,
            idle_links: held.idle_links() as u64,
            orphans: orphans.len() as u64,
            hub_devices: hub_devices(node)?,
            ports: gauge("xdp_imds_ports")?,
            identities: gauge("xdp_imds_identities")?,
            records: gauge("xdp_imds_records")?,
            connections: gauge("xdp_imds_stack_connections")?,
            frames: gauge("xdp_imds_received_frames_total")?,
            unaccounted,
        })
    }
}

/// Returns the metrics, the ledger and the number of unaccounted frames, once all frames since the first sample are
/// accounted for, or after [`SETTLE`]. Without a first sample it waits until no counter changes.
fn settled(agent: &Agent<'_>, node: &Namespace, first: Option<Ledger>) -> Result<(Metrics, Ledger, u64)> {
    let end = Instant::now() + SETTLE;
    let mut before = None;
    loop {
        // A retransmission may be counted between two reads. It is enough that the counters agree once.
        let lost_by_device = dropped(node)?;
        let metrics = agent.metrics()?;
        let ledger = Ledger::read(&metrics, lost_by_device)?;
        let unaccounted = match first {
            Some(first) => ledger.since(&first).unaccounted(),
            None => 0,
        };
        let rests = first.is_some() || before == Some(ledger);
        if unaccounted == 0 && rests || Instant::now() >= end {
            if unaccounted > 0 {
                eprintln!("unaccounted frames: {:?}", first.map(|first| ledger.since(&first)));
            }
            return Ok((metrics, ledger, unaccounted));
        }
        before = Some(ledger);
        std::thread::sleep(PAUSE);
    }
}

/// Frames counted at each place, in the order of their path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ledger {
    /// Frames that `port` sent to the hub.
    steered: u64,
    /// Frames that `socket` gave to a socket, and those for which there was none.
    delivered: u64,
    absent: u64,
    /// Frames that the hub device dropped, including those for which the socket had no room.
    lost_by_device: u64,
    /// Frames that the socket received, and those that it dropped.
    received: u64,
    lost_at_socket: u64,
    /// Frames that the link rejected.
    lost_at_link: u64,
    /// Frames that the stack received.
    stack: u64,
    /// Frames that the hub tap accepted, and frames that reached `hub`.
    sent: u64,
    hub: u64,
}

impl Ledger {
    fn read(metrics: &Metrics, lost_by_device: u64) -> Result<Self> {
        let lost = |reasons: &[&str]| -> u64 {
            let of = metrics.samples().iter().filter(|sample| {
                sample.name == "xdp_imds_receive_lost_frames_total"
                    && sample.label("reason").is_some_and(|reason| reasons.contains(&reason))
            });
            of.map(|sample| sample.value as u64).sum()
        };
        Ok(Self {
            steered: metrics.frames("steer_")?,
            delivered: metrics.frames("socket_delivered")? + metrics.frames("ring_delivered")?,
            absent: metrics.frames("socket_drop_absent")? + metrics.frames("ring_drop_")?,
            lost_by_device,
            received: value(metrics, "xdp_imds_received_frames_total")?,
            lost_at_socket: lost(&["ring_full", "dropped"]),
            lost_at_link: lost(&["runt", "unstamped", "slot_out_of_range", "over_share"]),
            stack: value(metrics, "xdp_imds_stack_received_total")?,
            sent: value(metrics, "xdp_imds_sent_frames_total")?,
            hub: metrics.frames("hub_")?,
        })
    }

    /// Returns the growth since `first`.
    fn since(&self, first: &Self) -> Self {
        let since = |of: fn(&Self) -> u64| of(self).saturating_sub(of(first));
        Self {
            steered: since(|ledger| ledger.steered),
            delivered: since(|ledger| ledger.delivered),
            absent: since(|ledger| ledger.absent),
            lost_by_device: since(|ledger| ledger.lost_by_device),
            received: since(|ledger| ledger.received),
            lost_at_socket: since(|ledger| ledger.lost_at_socket),
            lost_at_link: since(|ledger| ledger.lost_at_link),
            stack: since(|ledger| ledger.stack),
            sent: since(|ledger| ledger.sent),
            hub: since(|ledger| ledger.hub),
        }
    }

    /// Counts frames that were seen at one place, but neither seen nor counted as lost at the next.
    fn unaccounted(&self) -> u64 {
        let at_device = self.steered.abs_diff(self.delivered + self.absent);
        // The device counts frames that the socket refused, and frames for which it had no room itself.
        let unexplained = at_device.saturating_sub(self.lost_by_device.saturating_sub(self.lost_at_socket));
        unexplained
            + self.delivered.abs_diff(self.received + self.lost_at_socket)
            + self.received.abs_diff(self.stack + self.lost_at_link)
            + self.sent.abs_diff(self.hub)
    }
}

/// Returns the sum of a metric over all its labels.
fn value(metrics: &Metrics, name: &str) -> Result<u64> {
    let mut found = metrics.samples().iter().filter(|sample| sample.name == name).peekable();
    ensure!(found.peek().is_some(), "the agent has no metric {name}");
    Ok(found.map(|sample| sample.value as u64).sum())
}

/// Returns the number of frames that the hubs' inner ends have dropped.
fn dropped(node: &Namespace) -> Result<u64> {
    let table = node.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    let mut ends = table.lines().filter(|line| line.trim_start().starts_with(INNER)).peekable();
    ensure!(ends.peek().is_some(), "there is no hub");
    // The columns of received frames begin with bytes, packets, errors, dropped (Linux: net/core/net-procfs.c).
    let dropped = |line: &str| line.split_once(':')?.1.split_whitespace().nth(3)?.parse::<u64>().ok();
    ends.map(|line| dropped(line).context("cannot parse /proc/net/dev")).sum()
}

/// Returns the number of hub devices in the agent's namespace.
pub(super) fn hub_devices(node: &Namespace) -> Result<u64> {
    let table = node.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    Ok(table.lines().filter(|line| line.trim_start().starts_with(HUB)).count() as u64)
}

/// Returns the number of a process's descriptors except those of eBPF objects, and how many of them are namespaces.
fn descriptors(pid: u32) -> Result<(u64, u64)> {
    let (mut all, mut namespaces) = (0, 0);
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        // Links come and go as guests become quiet, so they are counted separately.
        all += u64::from(!target.starts_with("anon_inode:bpf"));
        namespaces += u64::from(target.starts_with("net:[") || target.starts_with("/run/netns/"));
    }
    Ok((all, namespaces))
}

fn count(directory: &str) -> Result<u64> {
    Ok(std::fs::read_dir(directory).with_context(|| format!("cannot list {directory}"))?.count() as u64)
}

/// Returns resident memory without mapped files, in bytes.
fn resident(pid: u32) -> Result<u64> {
    crate::storm::cpu::resident(pid).with_context(|| format!("cannot read the memory of process {pid}"))
}

#[cfg(test)]
mod tests {
    use super::Ledger;

    const RIGHT: Ledger = Ledger {
        steered: 1_000,
        delivered: 900,
        absent: 50,
        lost_by_device: 80,
        received: 870,
        lost_at_socket: 30,
        lost_at_link: 20,
        stack: 850,
        sent: 400,
        hub: 400,
    };

    #[test]
    fn counts_from_before_the_first_sample_are_ignored() {
        let later = Ledger { steered: 1_010, delivered: 910, received: 880, stack: 860, ..RIGHT };
        assert_eq!(later.since(&RIGHT).unaccounted(), 0);
        let odd = Ledger { received: 0, stack: 0, lost_at_link: 0, ..RIGHT };
        assert_eq!(odd.since(&odd).unaccounted(), 0);
        assert_eq!(Ledger { stack: 861, ..later }.since(&RIGHT).unaccounted(), 1);
    }

    #[test]
    fn a_frame_missing_at_any_place_is_unaccounted_for() {
        assert_eq!(RIGHT.unaccounted(), 0);
        for wrong in [
            Ledger { steered: 1_001, ..RIGHT },
            Ledger { received: 869, stack: 849, ..RIGHT },
            Ledger { stack: 849, ..RIGHT },
            Ledger { stack: 851, ..RIGHT },
            Ledger { hub: 399, ..RIGHT },
            Ledger { lost_by_device: 79, ..RIGHT },
        ] {
            assert_eq!(wrong.unaccounted(), 1, "{wrong:?}");
        }
    }
}

//! What could not be done for a port, and why.

use metadata_common::maps::MAX_PORTS;
use metadata_common::port::PortName;
use metadata_common::share::{FairShare, ShareError, Tenant};
use metadata_control::status::{GuestState, PortState};
use metadata_datapath::stack::SlotStats;
use metadata_steer::{AnswerPath, SteeringProgram};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::NodePorts;
use crate::agent::node::answers::SlotContent;
use crate::agent::slots::IdentityName;

/// Ports that wait for another attempt, and the last reason that was logged for each port.
#[derive(Debug, Default)]
pub(super) struct PortProblems {
    unsettled: BTreeSet<PortName>,
    reasons: HashMap<PortName, String>,
    /// Ports without an interface that no summary has counted yet, by reason: the first [`NAMED`], and how many there
    /// are.
    absent: BTreeMap<&'static str, (Vec<PortName>, usize)>,
}

/// Ports that a summary of the log names.
const NAMED: usize = 4;

impl PortProblems {
    /// Schedules another attempt. Logs the reason if it differs from the last one.
    pub(super) fn report(&mut self, port: &PortName, reason: &str) {
        if self.note(port, reason) {
            warn!("port {port}: {reason}");
        }
    }

    /// Like [`PortProblems::report`], for what passes by itself in the course of things: a VM's record precedes its
    /// tap, and a takeover delays new ports.
    pub(super) fn wait(&mut self, port: &PortName, reason: &str) {
        if self.note(port, reason) {
            info!("port {port}: {reason}");
        }
    }

    /// Like [`PortProblems::wait`] for a port whose interface does not exist. The next [`PortProblems::log_absent`]
    /// logs it with all others: a node may have thousands of VMs that are off.
    pub(super) fn wait_for_device(&mut self, port: &PortName, reason: &'static str) {
        if self.note(port, reason) {
            let (named, count) = self.absent.entry(reason).or_default();
            *count += 1;
            if named.len() < NAMED {
                named.push(port.clone());
            }
        }
    }

    /// Logs one line for each reason on the ports whose interface is absent, if there are new ones.
    pub(super) fn log_absent(&mut self) {
        for (reason, (named, count)) in std::mem::take(&mut self.absent) {
            if let ([port], 1) = (&named[..], count) {
                info!("port {port}: {reason}");
                continue;
            }
            let more = if count > named.len() { ", …" } else { "" };
            let named: Vec<_> = named.iter().map(ToString::to_string).collect();
            info!("{count} ports ({}{more}): {reason}", named.join(", "));
        }
    }

    /// Schedules another attempt. Returns whether the reason differs from the last one.
    fn note(&mut self, port: &PortName, reason: &str) -> bool {
        self.unsettled.insert(port.clone());
        let is_new = self.reason(port) != Some(reason);
        if is_new {
            self.reasons.insert(port.clone(), reason.to_owned());
        }
        is_new
    }

    /// Begins an attempt. The port is settled unless it is reported again.
    pub(super) fn begin(&mut self, port: &PortName) {
        self.unsettled.remove(port);
    }

    /// Ends an attempt. Forgets the reason unless the port was reported again.
    pub(super) fn end(&mut self, port: &PortName) {
        if !self.unsettled.contains(port) {
            self.forget(port);
        }
    }

    /// Forgets the reason, so that the next one is logged.
    pub(super) fn forget(&mut self, port: &PortName) {
        self.reasons.remove(port);
    }

    /// The last reason reported for a port.
    pub(super) fn reason(&self, port: &PortName) -> Option<&str> {
        self.reasons.get(port).map(String::as_str)
    }

    /// True if another attempt is due for the port.
    pub(super) fn is_unsettled(&self, port: &PortName) -> bool {
        self.unsettled.contains(port)
    }

    /// The ports for which another attempt is due.
    pub(super) fn unsettled(&self) -> impl Iterator<Item = &PortName> {
        self.unsettled.iter()
    }

    /// Takes the ports for which another attempt is due.
    pub(super) fn take_unsettled(&mut self) -> BTreeSet<PortName> {
        std::mem::take(&mut self.unsettled)
    }
}

// The states of ports and guests, for reports.

/// The reason of a port whose interface does not exist.
pub(super) const ABSENT: &str = "no such interface yet; it is attached as soon as it appears";

/// The reason of a port whose network namespace does not exist.
pub(super) const NO_NAMESPACE: &str = "no such network namespace yet (a name under /run/netns, or a path such as \
     /proc/PID/ns/net); the port is attached as soon as its interface appears there";

/// The reason of a port whose guest gets no answer.
pub(super) const UNREACHABLE: &str = "answers do not reach the guest: the device accepts no redirected \
     frames. For a veth, turn on GRO at its other end (`ethtool -K PEER gro on`); otherwise give the guest a tap. The port \
     is served as soon as its device accepts them";

/// The note on a port that is served by the classifier.
const BY_CLASSIFIER: &str = "served at a higher cost per frame: the device accepts no redirected frames, so a \
     classifier delivers the answers. For a veth, turn on GRO at its other end (`ethtool -K PEER gro on`)";

impl NodePorts {
    /// The state of a wanted port, and the reason.
    #[must_use]
    pub(crate) fn state_of(&self, port: &PortName) -> (PortState, Option<&str>) {
        match self.troubles.reason(port) {
            Some(reason @ (ABSENT | NO_NAMESPACE)) => (PortState::Waiting, Some(reason)),
            Some(reason) => (PortState::Error, Some(reason)),
            None if self.steering.attachments().is_attached(port) => {
                let by_classifier = self.steering.attachments().answer_path(port) == AnswerPath::Classifier;
                (PortState::Attached, by_classifier.then_some(BY_CLASSIFIER))
            }
            None => (PortState::Waiting, Some("about to be attached")),
        }
    }

    /// The program that steers a port.
    #[must_use]
    pub(crate) fn program_of(&self, port: &PortName) -> Option<String> {
        let by = self.steering.attachments().steered_by(port)?;
        Some(if by == SteeringProgram::Xdp { "xdp" } else { "tcx" }.into())
    }

    /// What an identity's requests get.
    #[must_use]
    pub(crate) fn guest_state(&self, who: &IdentityName) -> GuestState {
        self.state_when(&who.port, self.bindings.get(who).map(|(_, serves)| serves))
    }

    /// Like `guest_state`, for a caller that has already looked up what the guest's slot serves.
    #[must_use]
    pub(crate) fn state_when(&self, port: &PortName, serves: Option<&SlotContent>) -> GuestState {
        match serves {
            Some(_) if self.steering.attachments().answer_path(port) == AnswerPath::None => {
                GuestState::Unreachable
            }
            Some(SlotContent::Responses(_)) => GuestState::Served,
            Some(SlotContent::Awaited) => GuestState::Awaited,
            Some(SlotContent::Gone) => GuestState::Gone,
            None => GuestState::Unbound,
        }
    }

    /// Asks the worker of an identity how many connections and requests it holds; `None` if the identity is not bound.
    #[must_use]
    pub(crate) fn ask_held(&self, who: &IdentityName) -> Option<oneshot::Receiver<SlotStats>> {
        let (slot, _) = self.bindings.get(who)?;
        self.workers().ask_held(self.steering.hubs().worker_of(slot), slot)
    }
}

// How tenants share the ports of a node.

/// Ports that each tenant may have while the node's limit is not reached.
const FLOOR: usize = 64;

/// The tenant of each attached port.
#[derive(Debug)]
pub(super) struct PortShares {
    share: FairShare,
    tenants: HashMap<PortName, Tenant>,
}

impl Default for PortShares {
    fn default() -> Self {
        Self { share: FairShare::new(MAX_PORTS as usize, FLOOR), tenants: HashMap::new() }
    }
}

impl PortShares {
    /// Counts a port that is about to be attached, unless it counts already.
    ///
    /// # Errors
    /// The tenant has its share.
    pub(super) fn admit(&mut self, port: &PortName, tenant: Tenant) -> Result<(), ShareError> {
        if !self.tenants.contains_key(port) {
            self.share.admit(&tenant, 1)?;
            self.tenants.insert(port.clone(), tenant);
        }
        Ok(())
    }

    /// Counts a port no more.
    pub(super) fn release(&mut self, port: &PortName) {
        if let Some(tenant) = self.tenants.remove(port) {
            self.share.release(&tenant, 1);
        }
    }

    /// Counts no port for which `is_attached` is false: a device that was renamed or deleted is detached elsewhere.
    pub(super) fn retain(&mut self, is_attached: impl Fn(&PortName) -> bool) {
        let share = &mut self.share;
        self.tenants.retain(|port, tenant| {
            let keep = is_attached(port);
            if !keep {
                share.release(tenant, 1);
            }
            keep
        });
    }

    pub(super) fn share(&self) -> &FairShare {
        &self.share
    }
}

#[cfg(test)]
mod tests {
    use metadata_common::port::PortName;

    use super::{MAX_PORTS, NAMED, PortProblems, PortShares, Tenant};
    use crate::logging::LogCollector;

    #[test]
    fn a_port_stays_unsettled_with_its_reason_until_an_attempt_reports_nothing() {
        let (mut troubles, port) = (PortProblems::default(), PortName::local("tap0"));
        troubles.report(&port, "absent");
        troubles.begin(&port);
        troubles.report(&port, "absent");
        troubles.end(&port);
        assert_eq!((troubles.is_unsettled(&port), troubles.reason(&port)), (true, Some("absent")));
        troubles.begin(&port);
        troubles.end(&port);
        assert_eq!((troubles.is_unsettled(&port), troubles.reason(&port)), (false, None));
    }

    #[test]
    fn absent_interfaces_are_one_summary_and_no_warning() {
        let mut troubles = PortProblems::default();
        for number in 0..2_000 {
            troubles.wait_for_device(&PortName::local(&*format!("tap{number}")), "absent");
            troubles.wait_for_device(&PortName::local(&*format!("tap{number}")), "absent");
        }
        troubles.wait_for_device(&PortName::local("elsewhere"), "no namespace");
        let (named, count) = &troubles.absent["absent"];
        assert_eq!((named.len(), *count), (NAMED, 2_000));
        let log = LogCollector::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(lines, || {
            troubles.log_absent();
            troubles.log_absent();
        });
        let text = log.text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("port elsewhere: no namespace"), "{text}");
        assert!(
            text.contains("INFO") && text.contains("2000 ports (tap0, tap1, tap2, tap3, …): absent"),
            "{text}"
        );
        assert_eq!(troubles.unsettled().count(), 2_001);
    }

    #[test]
    fn taking_the_unsettled_ports_keeps_their_reasons() {
        let (mut troubles, port) = (PortProblems::default(), PortName::local("tap0"));
        troubles.report(&port, "absent");
        assert_eq!(troubles.take_unsettled(), [port.clone()].into());
        assert_eq!((troubles.unsettled().count(), troubles.reason(&port)), (0, Some("absent")));
    }

    #[test]
    fn a_namespace_that_takes_all_ports_it_gets_leaves_some_for_another() {
        let mut shares = PortShares::default();
        let (hostile, modest) = (Tenant::namespace("hostile"), Tenant::namespace("modest"));
        let port = |n: u32| PortName { ifname: format!("tap{n}"), netns: Some("/proc/42/ns/net".into()) };
        for _ in 0..2 {
            let admitted =
                (0..MAX_PORTS).filter(|n| shares.admit(&port(*n), hostile.clone()).is_ok()).count();
            assert_eq!(admitted, MAX_PORTS as usize / 2, "attached ports count once");
        }
        shares.admit(&port(MAX_PORTS), modest).expect("a port");
        (0..2).for_each(|n| shares.release(&port(n)));
        shares.admit(&port(MAX_PORTS + 1), hostile).expect("one is free again");
        shares.retain(|_| false);
        assert_eq!(shares.share().used(), 0);
    }
}

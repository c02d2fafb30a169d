//! What could not be done for a port, and why.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use metadata_base::port::PortName;
use tracing::{info, warn};

/// Ports that wait for another attempt, and the last reason that was logged for each port.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    unsettled: BTreeSet<PortName>,
    reasons: HashMap<PortName, String>,
    /// Ports without an interface that no summary has counted yet, by reason: the first [`NAMED`], and how many there are.
    absent: BTreeMap<&'static str, (Vec<PortName>, usize)>,
}

/// Ports that a summary of the log names.
const NAMED: usize = 4;

impl Troubles {
    /// Schedules another attempt. Logs the reason if it differs from the last one.
    pub(super) fn report(&mut self, port: &PortName, reason: &str) {
        if self.note(port, reason) {
            warn!("port {port}: {reason}");
        }
    }

    /// Like [`Troubles::report`], for what passes by itself in the course of things: a VM's record precedes its tap, and
    /// a takeover delays new ports.
    pub(super) fn wait(&mut self, port: &PortName, reason: &str) {
        if self.note(port, reason) {
            info!("port {port}: {reason}");
        }
    }

    /// Like [`Troubles::wait`] for a port whose interface does not exist. The next [`Troubles::log_absent`] logs it with
    /// all others: a node may have thousands of VMs that are off.
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

#[cfg(test)]
mod tests {
    use super::{NAMED, Troubles};
    use crate::logging::Sink;
    use metadata_base::port::PortName;

    #[test]
    fn a_port_stays_unsettled_with_its_reason_until_an_attempt_reports_nothing() {
        let (mut troubles, port) = (Troubles::default(), PortName::local("tap0"));
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
        let mut troubles = Troubles::default();
        for number in 0..2_000 {
            troubles.wait_for_device(&PortName::local(&*format!("tap{number}")), "absent");
            troubles.wait_for_device(&PortName::local(&*format!("tap{number}")), "absent");
        }
        troubles.wait_for_device(&PortName::local("elsewhere"), "no namespace");
        let (named, count) = &troubles.absent["absent"];
        assert_eq!((named.len(), *count), (NAMED, 2_000));
        let log = Sink::default();
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
        let (mut troubles, port) = (Troubles::default(), PortName::local("tap0"));
        troubles.report(&port, "absent");
        assert_eq!(troubles.take_unsettled(), [port.clone()].into());
        assert_eq!((troubles.unsettled().count(), troubles.reason(&port)), (0, Some("absent")));
    }
}

//! Taps without a record are kept closed (`guard: all`).
//!
//! A closed tap is a port on which no identity is served. A tap is closed at the latest when an event reports it. When
//! a record names it, it becomes an ordinary port, without being open in between. When the record is removed, it is
//! closed again. In a namespace other than the agent's own, taps are closed only while a port is served there: a port
//! keeps its namespace alive, and a pod's namespace must be able to end.

use std::collections::BTreeSet;

use metadata_common::maps::MAX_PORTS;
use metadata_common::port::PortName;
use metadata_steer::{ClosedTaps, DeviceLookup, SteerError, is_hub_tap};
use tracing::{debug, info, warn};

use super::NodePorts;
use super::problems::PortProblems;
use crate::agent::plan::Plan;

/// Most closed taps of a namespace other than the agent's own, such as a pod's. Anyone who makes more taps there leaves
/// his own pod unguarded, and takes nobody's ports.
pub(super) const CLOSED_MOST: usize = 64;

/// Which taps are guarded, and which are closed.
#[derive(Debug, Default)]
pub(crate) struct TapGuard {
    guarded: ClosedTaps,
    /// Prefix of the devices of the agent's own hubs.
    hub: String,
    /// Closed ports. Together with all other ports they are at most [`MAX_PORTS`].
    closed: BTreeSet<PortName>,
}

impl TapGuard {
    /// Guards taps without a record, except those of hubs with this prefix.
    #[must_use]
    pub(crate) fn new(guarded: ClosedTaps, hub: &str) -> Self {
        Self { guarded, hub: hub.into(), closed: BTreeSet::new() }
    }

    /// True if a tap of this name must be closed while the plan does not want it.
    pub(super) fn guards(&self, port: &PortName, plan: &Plan) -> bool {
        self.guarded == ClosedTaps::All
            && (port.netns.is_none() || plan.namespaces().any(|netns| *netns == port.netns))
            && !is_hub_tap(&self.hub, &port.ifname)
    }

    fn closed_in<'a>(&'a self, netns: Option<&'a str>) -> impl Iterator<Item = &'a PortName> {
        self.closed.iter().filter(move |port| port.netns.as_deref() == netns)
    }
}

impl NodePorts {
    /// Taps that are closed.
    pub(crate) fn closed(&self) -> impl Iterator<Item = &PortName> {
        self.guard.closed.iter()
    }

    /// Taps that should be closed and are not, and why.
    pub(crate) fn failed_to_close<'a>(
        &'a self,
        plan: &'a Plan,
    ) -> impl Iterator<Item = (&'a PortName, &'a str)> {
        let unwanted = self.troubles.unsettled().filter(|port| !plan.wants(port));
        unwanted.filter_map(|port| Some((port, self.troubles.reason(port)?)))
    }

    /// Touches the taps of a namespace that should be closed, and those that are closed.
    pub(super) fn touch_taps(&mut self, netns: Option<&str>, plan: &Plan) {
        self.touched.extend(self.guard.closed_in(netns).cloned());
        let open = self.open_taps(netns, plan);
        self.touched.extend(open);
    }

    /// Touches taps that should be closed and are not, except those that wait for another attempt. Returns true while
    /// ports are to be settled.
    pub(super) fn touch_inherited_taps(&mut self, plan: &Plan) -> bool {
        for netns in plan.watched_namespaces() {
            let open = self.open_taps(netns.as_deref(), plan);
            self.touched.extend(open.into_iter().filter(|port| !self.troubles.is_unsettled(port)));
        }
        self.has_work()
    }

    /// The taps of a namespace that should be closed and are not.
    fn open_taps(&self, netns: Option<&str>, plan: &Plan) -> Vec<PortName> {
        if self.guard.guarded == ClosedTaps::None {
            return Vec::new();
        }
        let taps = self.steering.taps(netns).unwrap_or_else(|error| {
            warn!(?netns, "taps without a record may be open there: {error}");
            Vec::new()
        });
        let named = taps.into_iter().map(|ifname| PortName { ifname, netns: netns.map(str::to_owned) });
        let is_open = |port: &PortName| {
            !plan.wants(port) && !self.guard.closed.contains(port) && self.guard.guards(port, plan)
        };
        let most = match netns {
            // One more, so that it is reported.
            Some(_) => (CLOSED_MOST + 1).saturating_sub(self.guard.closed_in(netns).count()),
            None => MAX_PORTS as usize,
        };
        named.filter(is_open).take(most).collect()
    }

    /// Closes a port without a record and unbinds its identities. A port that is not a tap is detached.
    pub(super) fn close(&mut self, port: &PortName, plan: &Plan) {
        if self.has_its_closed(port, plan) {
            return;
        }
        self.bindings.unbind_on(&mut self.steering, port, |_| true);
        match self.steering.attachments().find(port) {
            Ok(DeviceLookup::Attached) if self.guard.closed.contains(port) => {}
            Ok(found @ (DeviceLookup::Attached | DeviceLookup::Other)) => match self.steering.is_tap(port) {
                Ok(true) if found == DeviceLookup::Attached => {}
                Ok(true) => {
                    if !self.attach_closed(port, plan) {
                        return;
                    }
                }
                Ok(false) => return self.release_unguarded(port, plan),
                Err(error) => return self.troubles.report(port, &format!("the tap may stay open: {error}")),
            },
            Ok(DeviceLookup::Nothing | DeviceLookup::NoNamespace) => return self.forget_closed(port),
            Err(error) => return self.troubles.report(port, &format!("the tap may stay open: {error}")),
        }
        // The previous agent may have bound identities there that have no record now.
        self.bindings.keep_inherited(&mut self.steering, port, plan);
        match self.steering.set_closed(port, true) {
            Ok(()) => drop(self.guard.closed.insert(port.clone())),
            Err(error @ SteerError::TakingOver { .. }) => self.troubles.wait(port, &error.to_string()),
            Err(error) => self.troubles.report(port, &error.to_string()),
        }
    }

    /// True if a tap stays open because its namespace has as many closed ones as it may have. Reports the first of
    /// them.
    fn has_its_closed(&mut self, port: &PortName, plan: &Plan) -> bool {
        let netns = port.netns.as_deref();
        let has_its = netns.is_some()
            && !self.guard.closed.contains(port)
            && !self.steering.attachments().is_attached(port)
            && self.guard.closed_in(netns).count() >= CLOSED_MOST;
        let is_first = |troubles: &PortProblems| {
            let mut others = troubles.unsettled().filter(|other| other.netns == port.netns);
            others.all(|other| plan.wants(other))
        };
        if has_its && is_first(&self.troubles) {
            let reason = format!(
                "the tap stays open: expected at most {CLOSED_MOST} taps without a record in one network namespace, found \
                 more; find out what made them"
            );
            self.troubles.report(port, &reason);
        }
        has_its
    }

    /// Attaches a tap as closed; true if it is.
    fn attach_closed(&mut self, port: &PortName, plan: &Plan) -> bool {
        self.forget_closed(port);
        if !self.admit(port, plan) {
            return false;
        }
        match self.steering.attach_closed(port) {
            Ok(()) => {
                // A port of the previous agent is closed once it is taken over.
                if self.steering.attachments().is_closed(port) == Some(true) {
                    info!(%port, "closed, because it has no record");
                }
                return true;
            }
            // The device is a port under another name, with a record or closed.
            Err(SteerError::SamePort { other, .. }) => {
                debug!(%port, %other, "the tap is already a port under another name")
            }
            Err(error @ SteerError::TakingOver { .. }) => self.troubles.wait(port, &error.to_string()),
            Err(error) => self.troubles.report(port, &format!("the tap stays open: {error}")),
        }
        false
    }

    /// Opens a wanted port for the identities that will be bound on it; true if it is open.
    pub(super) fn open(&mut self, port: &PortName) -> bool {
        match self.steering.set_closed(port, false) {
            Ok(()) => {
                self.guard.closed.remove(port);
                true
            }
            Err(error @ SteerError::TakingOver { .. }) => {
                self.troubles.wait(port, &error.to_string());
                false
            }
            Err(error) => {
                self.troubles.report(port, &error.to_string());
                false
            }
        }
    }

    /// Renames a closed port to the wanted name of the same device; false if `other` is not closed.
    pub(super) fn rename_closed(&mut self, port: &PortName, other: &PortName) -> bool {
        let renamed = self.guard.closed.remove(other);
        if renamed {
            self.steering.attachments_mut().rename(other, port);
            self.shares.release(other);
            debug!(%other, %port, "the tap has a record");
        }
        renamed
    }

    /// Detaches a port that is no longer to be closed.
    fn forget_closed(&mut self, port: &PortName) {
        self.guard.closed.remove(port);
        self.detach(port);
    }

    /// Detaches a port. If it was the last served port of its namespace, touches the closed ports there.
    pub(super) fn release_unguarded(&mut self, port: &PortName, plan: &Plan) {
        self.forget_closed(port);
        let stranded = self.guard.closed.iter().filter(|port| !self.guard.guards(port, plan));
        self.touched.extend(stranded.cloned());
    }
}

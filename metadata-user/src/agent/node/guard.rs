//! Taps without a record are kept closed (`guard: all`).
//!
//! They are ports of ours with nobody on them. A tap is closed when it appears, at the latest with the event that tells
//! of it; becomes an ordinary port when a record names it, without having been open in between; and is closed again
//! when its record goes. In namespaces other than the agent's that lasts while a port is served there: a namespace
//! that is looked after is kept alive, and that of a pod must be able to go.

use metadata_common::maps::MAX_PORTS;
use tracing::{debug, info, warn};

use super::Node;
use metadata_base::port::PortName;
use metadata_steer::{Found, Guarded, SteerError, is_hub_tap};

/// What is guarded, and how far.
#[derive(Debug, Default)]
pub(super) struct Guard {
    guarded: Guarded,
    /// Prefix of our own hubs' devices.
    hub: String,
    /// Ports that are closed, at most [`MAX_PORTS`] with all others.
    closed: std::collections::BTreeSet<PortName>,
}

impl Node {
    /// Closes taps without a record from now on, but not those of hubs with this prefix.
    pub fn guards(&mut self, guarded: Guarded, hub: &str) {
        self.guard = Guard { guarded, hub: hub.into(), ..Guard::default() };
        self.look_for_taps(None);
    }

    /// Taps that are kept closed now.
    pub(super) fn closed(&self) -> impl Iterator<Item = &PortName> {
        self.guard.closed.iter()
    }

    /// Taps that should be closed and cannot be, and why.
    pub(super) fn left_open(&self) -> impl Iterator<Item = (&PortName, &str)> {
        let unwanted = self.unsettled.iter().filter(|port| !self.plan.wants(port));
        unwanted.filter_map(|port| Some((port, self.told.get(port)?.as_str())))
    }

    /// True for a port that is to be closed unless the plan wants it: if it is a tap.
    pub(super) fn is_guarded(&self, port: &PortName) -> bool {
        self.guard.guarded == Guarded::All
            && (port.netns.is_none() || self.plan.namespaces().any(|netns| *netns == port.netns))
            && !is_hub_tap(&self.guard.hub, &port.ifname)
    }

    /// Has the taps of a namespace looked at, and those of it that are closed.
    pub(super) fn look_for_taps(&mut self, netns: Option<&str>) {
        let there = self.guard.closed.iter().filter(|port| port.netns.as_deref() == netns);
        self.touched.extend(there.cloned());
        let unknown = self.unguarded_taps(netns);
        self.touched.extend(unknown);
    }

    /// Has taps looked at that an agent before may have left closed; false when there are none.
    pub(super) fn look_for_left_taps(&mut self) -> bool {
        for netns in self.namespaces() {
            let unknown = self.unguarded_taps(netns.as_deref());
            self.touched.extend(unknown.into_iter().filter(|port| !self.unsettled.contains(port)));
        }
        self.has_work()
    }

    /// The taps of a namespace that should be closed and are not.
    fn unguarded_taps(&self, netns: Option<&str>) -> Vec<PortName> {
        if self.guard.guarded == Guarded::None {
            return Vec::new();
        }
        let taps = self.steering.taps(netns).unwrap_or_else(|error| {
            warn!(?netns, "taps without a record may be open there: {error}");
            Vec::new()
        });
        let named = taps.into_iter().map(|ifname| PortName { ifname, netns: netns.map(str::to_owned) });
        let missing = |port: &PortName| {
            !self.plan.wants(port) && !self.guard.closed.contains(port) && self.is_guarded(port)
        };
        named.filter(missing).take(MAX_PORTS as usize).collect()
    }

    /// Closes a port nobody wants, with all that spoke on it; gives it up when there is no tap.
    pub(super) fn close(&mut self, port: &PortName) {
        for who in self.speakers(port).cloned().collect::<Vec<_>>() {
            self.unbind(&who);
        }
        match self.steering.find(port) {
            Ok(Found::Attached) if self.guard.closed.contains(port) => {}
            Ok(found @ (Found::Attached | Found::Other)) => match self.steering.is_tap(port) {
                Ok(true) if found == Found::Attached => {}
                Ok(true) => {
                    self.forget_closed(port);
                    match self.steering.attach_closed(port) {
                        Ok(()) => info!(%port, "closed: it has no record"),
                        // It has a record, or is closed, under another name.
                        Err(SteerError::SamePort { other, .. }) => {
                            return debug!(%port, %other, "is a port already");
                        }
                        Err(error) => return self.trouble(port, &format!("it stays open: {error}")),
                    }
                }
                Ok(false) => return self.give_up_unguarded(port),
                Err(error) => return self.trouble(port, &format!("it may stay open: {error}")),
            },
            Ok(Found::Nothing) => return self.forget_closed(port),
            Err(error) => return self.trouble(port, &format!("it may stay open: {error}")),
        }
        // Who an agent before bound there has no record now.
        self.go_on_with(port);
        match self.steering.set_closed(port, true) {
            Ok(()) => drop(self.guard.closed.insert(port.clone())),
            Err(error) => self.trouble(port, &error.to_string()),
        }
    }

    /// Opens a port that is wanted to those who will be bound there; true when it is open.
    pub(super) fn open(&mut self, port: &PortName) -> bool {
        match self.steering.set_closed(port, false) {
            Ok(()) => {
                self.guard.closed.remove(port);
                true
            }
            Err(error) => {
                self.trouble(port, &error.to_string());
                false
            }
        }
    }

    /// A wanted port's device is closed under another of its names: it goes by the wanted one from now on.
    pub(super) fn go_by(&mut self, port: &PortName, other: &PortName) -> bool {
        let renamed = self.guard.closed.remove(other);
        if renamed {
            self.steering.rename(other, port);
            debug!(%other, %port, "the tap has a record");
        }
        renamed
    }

    /// Nothing is there to be closed.
    fn forget_closed(&mut self, port: &PortName) {
        self.guard.closed.remove(port);
        self.give_up(port);
    }

    /// Gives a port up; with the last that is served in a namespace those that are closed there go.
    pub(super) fn give_up_unguarded(&mut self, port: &PortName) {
        self.guard.closed.remove(port);
        self.give_up(port);
        let stranded = self.guard.closed.iter().filter(|port| !self.is_guarded(port)).cloned();
        let stranded: Vec<_> = stranded.collect();
        self.touched.extend(stranded);
    }
}

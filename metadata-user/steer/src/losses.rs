//! Polls the kernel's devices every few seconds for two facts that no eBPF program sees: lost frames, and devices
//! that accept no redirected answers.

use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use super::devstats::{self, Dropped};
use super::{SteerError, Steering};
use metadata_base::port::PortName;
use metadata_links::netns::{self, Cookie};

/// Namespaces polled at once in addition to the agent's own. With a poll every second or two, a round of 1,000 pods
/// takes two minutes.
pub const NAMESPACES_AT_ONCE: usize = 16;

/// Frames of a hub that were lost without a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubLosses {
    /// Steered frames that found the ring of the hub's veth full. Concurrent updates from several CPUs may miss a
    /// few.
    pub veth_full: u64,
    /// Frames dropped by the kernel at the hub tap: those in `hub_drop_*`, and those the guest's device rejects
    /// because it is down, has too small an MTU, or accepts no redirected frames.
    pub tap_dropped: u64,
}

/// Lost frames, as of the last poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// By hub, in the order of [`Steering::hubs`].
    pub hubs: Vec<HubLosses>,
    /// Frames that ports' devices rejected since the first poll, whoever sent them: the guest's ring was full, or its
    /// device was down.
    pub ports: u64,
}

/// State of a port's device at the last poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Looks {
    /// Total of rejected frames at that poll.
    refused: Option<u64>,
    /// Whether it accepts redirected frames; `None` if the kernel does not report it.
    pub(super) takes: Option<bool>,
}

impl Looks {
    /// The state of a device that has just been attached.
    pub(super) fn new(ifindex: u32) -> Self {
        Self { refused: None, takes: devstats::takes_redirected(ifindex) }
    }

    /// Records the total of rejected frames; returns the increase since the last poll.
    fn note(&mut self, refused: u64) -> u64 {
        let last = self.refused.replace(refused);
        last.map_or(0, |last| refused.saturating_sub(last))
    }
}

impl Steering {
    /// Polls the devices of the agent's own namespace and of the next [`NAMESPACES_AT_ONCE`] others with ports.
    /// Returns the ports whose devices began or ceased to accept redirected frames. Call it every second or two;
    /// losses of a port before its first poll are not counted.
    pub fn inspect_devices(&mut self) -> Vec<PortName> {
        let mut changed = Vec::new();
        let home = Arc::clone(&self.devices.home);
        match home.run(look) {
            Ok(found) => self.take_in(&found, &mut changed),
            Err(error) => tracing::debug!("cannot poll devices: {error}"),
        }
        for port in self.next_elsewhere() {
            match self.netns_of(&port).and_then(|netns| netns.run(look)) {
                Ok(found) => self.take_in(&found, &mut changed),
                Err(error) => tracing::debug!(%port, "cannot poll devices: {error}"),
            }
        }
        changed
    }

    /// Lost frames, as of the last poll.
    #[must_use]
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// One port of each of the next namespaces.
    fn next_elsewhere(&mut self) -> Vec<PortName> {
        let after = self.last_polled.take().map_or(Unbounded, Excluded);
        let mut next: Vec<PortName> = Vec::new();
        for name in self.ports.range((after, Unbounded)).map(|(name, _)| name) {
            if name.netns.is_none() || next.iter().any(|other| other.netns == name.netns) {
                continue;
            }
            next.push(name.clone());
            if next.len() == NAMESPACES_AT_ONCE {
                self.last_polled = Some(name.clone());
                break;
            }
        }
        next
    }

    fn take_in(&mut self, found: &Look, changed: &mut Vec<PortName>) {
        let Look { cookie, dropped, takers } = found;
        for (ifindex, counts) in dropped {
            self.note(*cookie, *ifindex, *counts);
        }
        for (ifindex, takes) in takers {
            let Some(port) = self.places.get(&(*cookie, *ifindex)) else { continue };
            let Some(attached) = self.ports.get_mut(port).filter(|attached| !attached.gone) else { continue };
            if attached.looks.takes.replace(*takes) != Some(*takes) {
                changed.push(port.clone());
            }
        }
        for port in changed.iter() {
            if let Err(error) = self.enter_home(port) {
                tracing::warn!(%port, "answers keep their former path: {error}");
            }
        }
    }

    fn note(&mut self, cookie: Cookie, ifindex: u32, counts: Dropped) {
        let port = self.places.get(&(cookie, ifindex)).and_then(|port| self.ports.get_mut(port));
        if let Some(attached) = port.filter(|attached| !attached.gone) {
            self.losses.ports += attached.looks.note(counts.tx);
        } else if cookie == self.home {
            let hubs = self.devices.devices.iter().zip(&mut self.losses.hubs);
            for (devices, losses) in hubs {
                if devices.outer.ifindex == ifindex {
                    losses.veth_full = counts.tx;
                } else if devices.tap.ifindex == ifindex {
                    losses.tap_dropped = counts.rx;
                }
            }
        }
    }
}

/// State of a namespace's devices at one moment.
struct Look {
    cookie: Cookie,
    dropped: Vec<(u32, Dropped)>,
    takers: Vec<(u32, bool)>,
}

fn look() -> Result<Look, SteerError> {
    Ok(Look { cookie: netns::cookie()?, dropped: devstats::dropped()?, takers: devstats::all_takers() })
}

#[cfg(test)]
mod tests {
    use super::Looks;

    #[test]
    fn only_frames_rejected_between_two_polls_count() {
        let mut looks = Looks::default();
        assert_eq!(looks.note(7), 0, "before the first poll");
        assert_eq!(looks.note(7), 0);
        assert_eq!(looks.note(19), 12);
        assert_eq!(looks.note(3), 0, "a count never decreases, so this is another device");
        assert_eq!(looks.note(4), 1);
    }
}

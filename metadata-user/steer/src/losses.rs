//! Frames that are lost where no program of ours sees it, and devices that answers cannot be redirected to: the
//! kernel's devices are asked every few seconds.

use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use super::devstats::{self, Dropped};
use super::{SteerError, Steering};
use metadata_base::port::PortName;
use metadata_links::netns::{self, Cookie};

/// Namespaces beside the agent's own that are looked into at once: 16 of 1,000 pods are two minutes for all.
pub const NAMESPACES_AT_ONCE: usize = 16;

/// Frames of a hub that were lost without a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubLosses {
    /// Steered, and the ring of the hub's veth was full. CPUs that count at once may miss a few.
    pub veth_full: u64,
    /// Dropped by the kernel at the hub tap: those of `hub_drop_*`, and those the guest's device cannot take because
    /// it is down, narrower than the frame or takes no redirected frames.
    pub tap_dropped: u64,
}

/// What is lost, by the last look at the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// By hub, in the order of [`Steering::hubs`].
    pub hubs: Vec<HubLosses>,
    /// Frames that devices of ports did not take since they were first looked at, the agent's and all others: the
    /// guest's ring was full, or its device down.
    pub ports: u64,
}

/// What is known of a port's device by the last look at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Looks {
    /// Frames it had refused then.
    refused: Option<u64>,
    /// Whether frames can be redirected to it; `None` where the kernel does not say.
    pub(super) takes: Option<bool>,
}

impl Looks {
    /// Of a device that is attached now.
    pub(super) fn new(ifindex: u32) -> Self {
        Self { refused: None, takes: devstats::takes_redirected(ifindex) }
    }

    /// How many it has refused since the look before.
    fn note(&mut self, refused: u64) -> u64 {
        let last = self.refused.replace(refused);
        last.map_or(0, |last| refused.saturating_sub(last))
    }
}

impl Steering {
    /// Looks at the devices of the agent's own namespace and of the next [`NAMESPACES_AT_ONCE`] others with ports, and
    /// returns the ports that frames can be redirected to now and could not before, or the other way round. Call it
    /// every second or two: losses of a port before its first look are not counted.
    pub fn look_at_devices(&mut self) -> Vec<PortName> {
        let mut changed = Vec::new();
        let home = Arc::clone(&self.devices.home);
        match home.run(look) {
            Ok(found) => self.take_in(&found, &mut changed),
            Err(error) => tracing::debug!("devices are not looked at: {error}"),
        }
        for port in self.next_elsewhere() {
            match self.netns_of(&port).and_then(|netns| netns.run(look)) {
                Ok(found) => self.take_in(&found, &mut changed),
                Err(error) => tracing::debug!(%port, "devices are not looked at: {error}"),
            }
        }
        changed
    }

    /// What was lost, by the last look.
    #[must_use]
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// A port of each of the next namespaces.
    fn next_elsewhere(&mut self) -> Vec<PortName> {
        let after = self.looked_into.take().map_or(Unbounded, Excluded);
        let mut next: Vec<PortName> = Vec::new();
        for name in self.ports.range((after, Unbounded)).map(|(name, _)| name) {
            if name.netns.is_none() || next.iter().any(|other| other.netns == name.netns) {
                continue;
            }
            next.push(name.clone());
            if next.len() == NAMESPACES_AT_ONCE {
                self.looked_into = Some(name.clone());
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
            if let Err(error) = self.enter_bare(port) {
                tracing::warn!(%port, "answers go the way they went: {error}");
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

/// A namespace's devices at one moment.
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
    fn only_what_is_refused_between_two_looks_counts() {
        let mut looks = Looks::default();
        assert_eq!(looks.note(7), 0, "before the first look");
        assert_eq!(looks.note(7), 0);
        assert_eq!(looks.note(19), 12);
        assert_eq!(looks.note(3), 0, "a count never goes back, so it is another device's");
        assert_eq!(looks.note(4), 1);
    }
}

//! Compares links, programs and pins in the kernel with those that the agent holds, and repairs what somebody else has
//! taken away: `bpftool link detach`, `rm` in the directory of pins, a file system mounted over it.
//!
//! A round begins every [`CHECK_EVERY`] with the hubs, the maps' pins and the directory, and continues with
//! [`CHECKED_AT_ONCE`] ports in each call. A link costs two system calls (its state, its pin). Nothing is checked
//! during a takeover: until it is complete the ports belong to the other agent, and afterwards this one no longer holds
//! them.

use metadata_common::port::PortName;
use metadata_common::printable::counted;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::super::attach::{AttachmentFault, HeldLink, LinkFault};
use super::super::hubs::Hubs;
use super::super::pins::{Pin, PinDirectory, PinLocation, PinnedProgram, PinsView, RELEASE_GRACE};
use super::super::{SteerError, object};
use super::mode::Programs;
use super::{AttachedPort, Attachments};

/// Time from the begin of one round to the next, at least. A round of all ports that a node may have takes as long,
/// with a call every two seconds.
pub const CHECK_EVERY: Duration = Duration::from_secs(30);
/// Ports checked in one call of [`Steering::check`](crate::Steering::check), which blocks meanwhile: about 3 ms.
pub const CHECKED_AT_ONCE: usize = 1_024;
/// Programs kept for another attempt to detach them. The pins of further ones are left to the next agent.
const MAX_REMAINS: usize = 1_024;

/// The result of the checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachmentCheck {
    /// Time since the last complete round; `None` before the first.
    pub checked: Option<Duration>,
    /// What the last round found, a line for each kind of fault; empty if everything is as it should be.
    pub faults: Vec<String>,
    /// Faults found since the start, by kind. A fault that cannot be repaired counts in each round.
    pub found: BTreeMap<AttachmentFault, u64>,
    /// Numbers of namespaces that are not used again, because it is not proven that programs with them are detached.
    pub retired: usize,
}

/// The state of the checks.
#[derive(Default)]
pub(super) struct Checks {
    /// Where the last round left the pins.
    pins: Option<PinsView>,
    /// When the present or last round began.
    begun: Option<Instant>,
    /// The port that was checked last; `None` between two rounds.
    last: Option<PortName>,
    /// When the last round ended.
    completed: Option<Instant>,
    /// Faults of the present round, and of the one before.
    present: Faults,
    former: Faults,
    found: BTreeMap<AttachmentFault, u64>,
    /// A forced release is over: the rest of this round and the next one make its pins again, which is no fault.
    restores: bool,
    /// The present round began with `restores`.
    is_restoring: bool,
    /// A device of a hub has changed since the last call.
    is_hub_changed: bool,
    /// Programs that were to be detached and may still be attached, [`MAX_REMAINS`] at most.
    remains: Vec<HeldLink>,
}

type Faults = BTreeMap<AttachmentFault, FaultTally>;

/// The faults of one kind in one round.
#[derive(Clone, Debug, Default)]
struct FaultTally {
    count: u64,
    /// The first place where it was seen.
    example: String,
    unrepaired: u64,
    /// The error of the last repair that failed.
    error: String,
}

impl Checks {
    /// Keeps programs for another attempt to detach them.
    pub(super) fn keep(&mut self, remains: Vec<HeldLink>) {
        let room = MAX_REMAINS - self.remains.len();
        self.remains.extend(remains.into_iter().take(room));
    }

    fn note(&mut self, fault: AttachmentFault, place: &str, repaired: Result<(), SteerError>) {
        if fault == AttachmentFault::Unpinned && repaired.is_ok() && (self.restores || self.is_restoring) {
            return tracing::debug!(place, "pinned again after a forced release");
        }
        *self.found.entry(fault).or_default() += 1;
        let seen = self.present.entry(fault).or_default();
        if seen.count == 0 {
            place.clone_into(&mut seen.example);
            match fault {
                AttachmentFault::Released => tracing::warn!(
                    fault = fault.name(),
                    place,
                    "`xdp-imds release --force` removed the pins; \
                     they are not recreated for {} minutes, or until SIGHUP",
                    RELEASE_GRACE.as_secs() / 60
                ),
                AttachmentFault::Hidden => tracing::warn!(fault = fault.name(), "{place}"),
                _ => tracing::warn!(
                    fault = fault.name(),
                    place,
                    repaired = repaired.is_ok(),
                    "another program changed what the agent attached"
                ),
            }
        }
        seen.count += 1;
        if let Err(error) = repaired {
            seen.unrepaired += 1;
            seen.error = error.to_string();
        }
    }

    /// A line for each kind of fault.
    fn lines(&self) -> Vec<String> {
        let is_running = self.last.is_some();
        // While a round runs, a fault of the former one counts until this one is complete.
        let former = self.former.iter().filter(|(fault, _)| is_running && !self.present.contains_key(fault));
        let mut lines: Vec<_> =
            self.present.iter().chain(former).map(|(fault, seen)| seen.line(*fault)).collect();
        if !self.remains.is_empty() {
            lines.push(format!(
                "{} of ports that are gone could not be detached and unpinned (see the log): make the bpffs of the pins \
                 writable; each check tries again",
                counted(self.remains.len() as u64, "program")
            ));
        }
        lines
    }
}

impl FaultTally {
    fn line(&self, fault: AttachmentFault) -> String {
        let Self { count, example, unrepaired, error } = self;
        let was = if *count == 1 { "was" } else { "were" };
        let what = match fault {
            AttachmentFault::Detached => {
                format!("{} {was} detached by another program", counted(*count, "eBPF program"))
            }
            AttachmentFault::Replaced => {
                format!("{} {was} replaced by another program", counted(*count, "eBPF program"))
            }
            AttachmentFault::Unpinned => {
                format!("{} {was} removed or replaced by another program", counted(*count, "pin"))
            }
            AttachmentFault::Hidden => return example.clone(),
            AttachmentFault::Released => {
                return format!(
                    "`xdp-imds release --force` removed the pins in {example}: taps are open once this agent ends. If \
                     it still runs {} minutes after the release, it pins everything again; on SIGHUP, or when another \
                     agent takes over, at once",
                    RELEASE_GRACE.as_secs() / 60
                );
            }
            AttachmentFault::Down => format!(
                "{} of the hub {was} set down, or given another MTU, by another program",
                counted(*count, "device")
            ),
            AttachmentFault::Unknown if *count == 1 => "1 link, pin or device cannot be examined".to_owned(),
            AttachmentFault::Unknown => format!("{count} links, pins or devices cannot be examined"),
        };
        let first = match count {
            1 => format!("{what}: {example}"),
            _ => format!("{what}, the first at {example}"),
        };
        match (unrepaired, fault) {
            (0, AttachmentFault::Unpinned) => format!("{first}; pinned again"),
            (0, AttachmentFault::Down) => format!(
                "{first}; up again. Guests got no answer meanwhile: tell the node's network manager to leave the \
                 hub's devices alone"
            ),
            (0, _) => format!("{first}; attached again"),
            (some, AttachmentFault::Unknown) => format!("{first}: {error} ({some} in total)"),
            (some, _) => format!("{first}; {some} of them could not be restored: {error}"),
        }
    }
}

impl Attachments {
    /// The result of the checks.
    #[must_use]
    pub fn last_check(&self) -> AttachmentCheck {
        AttachmentCheck {
            checked: self.checks.completed.map(|completed| completed.elapsed()),
            faults: self.checks.lines(),
            found: AttachmentFault::ALL
                .map(|fault| (fault, self.checks.found.get(&fault).copied().unwrap_or_default()))
                .into(),
            retired: self.object.retired(),
        }
    }

    /// How many numbers of namespaces are not used again.
    #[must_use]
    pub fn retired(&self) -> usize {
        self.object.retired()
    }

    /// Undoes a forced release: the next round pins everything again.
    pub(crate) fn end_release(&mut self) {
        if let Some(pins) = self.pins.as_mut() {
            self.checks.restores |= pins.end_release();
        }
    }

    /// Makes the next call of [`Attachments::check`] look at all devices of the hubs.
    pub(crate) fn note_hub_change(&mut self) {
        self.checks.is_hub_changed = true;
    }

    /// Makes the next call of [`Attachments::check`] begin a round.
    pub(crate) fn check_soon(&mut self) {
        self.checks.begun = None;
        self.checks.last = None;
    }

    /// Checks the next [`CHECKED_AT_ONCE`] ports, and repairs what another program has changed. The call that begins a
    /// round checks the hubs first. Between two rounds this looks at the hubs' devices if one has changed, and at
    /// nothing else. Returns true while a round is not complete.
    pub(crate) fn check(&mut self, now: Instant, hubs: &mut Hubs) -> bool {
        let since = self.checks.begun.map(|begun| now.saturating_duration_since(begun));
        let is_due = self.checks.last.is_none() && since.is_none_or(|since| since >= CHECK_EVERY);
        let is_hub_changed = std::mem::take(&mut self.checks.is_hub_changed);
        if is_due {
            self.begin_round(now, hubs);
        } else {
            // A round looks at them itself. What is found just before one would count to the round that ends.
            if is_hub_changed {
                hubs.check_devices(|fault, place, repaired| self.checks.note(fault, place, repaired));
            }
            if self.checks.last.is_none() {
                return false;
            }
        }
        let after = self.checks.last.take().map_or(Unbounded, Excluded);
        let names = self.ports.range((after, Unbounded)).map(|(port, _)| port.clone());
        let names: Vec<_> = names.take(CHECKED_AT_ONCE).collect();
        names.iter().for_each(|port| self.check_port(port));
        let is_last =
            self.ports.last_key_value().is_none_or(|(last, _)| names.last().is_none_or(|at| at >= last));
        if is_last {
            self.checks.completed = Some(now);
            self.checks.is_restoring = false;
        } else {
            self.checks.last = names.last().cloned();
        }
        self.checks.last.is_some()
    }

    fn begin_round(&mut self, now: Instant, hubs: &mut Hubs) {
        self.checks.begun = Some(now);
        self.checks.former = std::mem::take(&mut self.checks.present);
        self.check_directory(now);
        self.checks.is_restoring = std::mem::take(&mut self.checks.restores);
        self.check_maps();
        let pins = self.pins.as_ref().filter(|pins| !pins.are_released());
        let (private, checks) = (self.object.private_path("again"), &mut self.checks);
        hubs.check(pins, &private, |fault, place, repaired| checks.note(fault, place, repaired));
        hubs.check_devices(|fault, place, repaired| self.checks.note(fault, place, repaired));
        let remains = std::mem::take(&mut self.checks.remains);
        let remains =
            remains.into_iter().filter_map(HeldLink::detach_and_unpin).filter(|held| !held.is_out_of_reach());
        self.checks.remains = remains.collect();
    }

    /// Begins a round if the directory of the pins has gone, has come back or leads elsewhere since the last round. For a
    /// caller that was told of a change there.
    pub(crate) fn check_pins(&mut self, now: Instant, hubs: &mut Hubs) {
        if self.pins.as_ref().map(PinDirectory::look) != self.checks.pins {
            self.check_soon();
            self.check(now, hubs);
        }
    }

    fn check_directory(&mut self, now: Instant) {
        let Some(pins) = &self.pins else { return };
        let shown = pins.directory().display().to_string();
        if let Ok(Some(cover)) = pins.cover() {
            let told = cover.explain(pins.directory());
            self.checks.note(AttachmentFault::Hidden, &told, Ok(()));
        }
        match pins.place() {
            Ok(PinLocation::There) => match self.mend_pins(now) {
                Ok(_) => {}
                Err(error) => self.checks.note(AttachmentFault::Unpinned, &shown, Err(error)),
            },
            Ok(PinLocation::Removed) => {
                let mended = self.mend_pins(now).map(drop);
                let is_released = self.pins.as_ref().is_some_and(PinDirectory::are_released);
                let fault = if is_released { AttachmentFault::Released } else { AttachmentFault::Unpinned };
                self.checks.note(fault, &shown, mended);
            }
            Ok(PinLocation::Hidden) => {}
            Err(error) => self.checks.note(AttachmentFault::Unknown, &shown, Err(error.into())),
        }
        self.checks.pins = self.pins.as_ref().map(PinDirectory::look);
    }

    /// Recreates the directories of the pins that were removed, with the pins of maps and hubs. Those of ports
    /// follow with the checks. After a forced release nothing is recreated for a while. Returns false without pins.
    pub(crate) fn mend_pins(&mut self, now: Instant) -> Result<bool, SteerError> {
        let Some(pins) = &mut self.pins else { return Ok(false) };
        if pins.place()? == PinLocation::Removed {
            self.checks.restores |= pins.note_release(now);
        }
        if !pins.are_released() {
            pins.make_again()?;
        }
        Ok(true)
    }

    fn check_maps(&mut self) {
        let Some(pins) = self.pins.as_ref().filter(|pins| !pins.are_released()) else { return };
        let missing: Vec<_> =
            object::pinned().filter(|map| !matches!(pins.map(map).inode(), Ok(Some(_)))).collect();
        for map in missing {
            let Some(pins) = &self.pins else { return };
            let (place, pinned) = (pins.map(map).to_string(), self.object.pin_map(map, pins));
            self.checks.note(AttachmentFault::Unpinned, &place, pinned.map_err(Into::into));
        }
    }

    fn check_port(&mut self, port: &PortName) {
        for on in [PinnedProgram::Xdp, PinnedProgram::Tcx] {
            let Some(AttachedPort { cookie, key, programs, gone: false, .. }) = self.ports.get(port) else {
                return;
            };
            let (cookie, key) = (*cookie, *key);
            let Some(held) = programs.held(on) else { continue };
            let pin = self.pin_of(on, cookie, key);
            let fault = match held.fault(pin.as_ref()) {
                Ok(None) => continue,
                Ok(Some(fault)) => fault,
                Err(source) => {
                    let error = SteerError::device(format!("examine the link of {port}"), source);
                    self.checks.note(AttachmentFault::Unknown, &port.to_string(), Err(error));
                    continue;
                }
            };
            // The link of a device that was deleted looks detached, and an event will say that it was.
            let is_there = |place| place == (cookie, Some(key.ifindex));
            if fault == LinkFault::Detached && !self.home.place_of(port).is_ok_and(is_there) {
                continue;
            }
            let netns = self.home.netns_of(port);
            let repaired = netns.and_then(|netns| netns.run(|| self.repair(port, on, fault, pin)));
            self.checks.note(fault.into(), &port.to_string(), repaired);
        }
    }

    /// Repairs a program of a port; called in its namespace.
    fn repair(
        &mut self,
        port: &PortName,
        on: PinnedProgram,
        fault: LinkFault,
        pin: Option<Pin>,
    ) -> Result<(), SteerError> {
        let Some(AttachedPort { cookie, key, .. }) = self.ports.get(port) else { return Ok(()) };
        let (cookie, key) = (*cookie, *key);
        let held = match (fault, pin) {
            (LinkFault::Unpinned, Some(pin)) => {
                let held = self.programs(port).and_then(|programs| programs.held_mut(on));
                return held.map_or(Ok(()), |held| Ok(held.pin_again(pin)?));
            }
            (LinkFault::Unpinned, None) => return Ok(()),
            (LinkFault::Replaced, Some(pin)) if matches!(pin.inode(), Ok(Some(_))) => {
                let link = self
                    .replace(on, cookie, &pin)
                    .map_err(|refusal| refusal.about(on.name(), port, key.ifindex))?;
                HeldLink::replaced(link, pin)?
            }
            (LinkFault::Replaced, _) => {
                if let Some(held) = self.programs(port).and_then(|programs| programs.held_mut(on)) {
                    held.detach().map_err(|source| SteerError::device("detach a foreign program", source))?;
                }
                self.put(on, port, cookie, key)?
            }
            (LinkFault::Detached, _) => self.put(on, port, cookie, key)?,
        };
        if let Some(programs) = self.programs(port) {
            programs.put(on, Some(held));
        }
        Ok(())
    }

    fn programs(&mut self, port: &PortName) -> Option<&mut Programs> {
        self.ports.get_mut(port).map(|attached| &mut attached.programs)
    }
}

#[cfg(test)]
mod tests {
    use super::{AttachmentFault, Checks, SteerError};
    use std::io;

    #[test]
    fn a_line_says_what_was_found_where_and_what_became_of_it() {
        let refused = || Err(SteerError::device("attach", io::Error::from_raw_os_error(libc::EBUSY)));
        let mut checks = Checks::default();
        checks.note(AttachmentFault::Detached, "tap0", Ok(()));
        checks.note(AttachmentFault::Detached, "tap1", refused());
        checks.note(AttachmentFault::Unpinned, "/pins/v1/links/port-1-2-3", Ok(()));
        checks.note(AttachmentFault::Hidden, "/pins leads elsewhere: `umount /pins`", Ok(()));
        checks.note(AttachmentFault::Down, "imds-in", Ok(()));
        let lines = checks.lines();
        let expected = [
            [
                "2 eBPF programs were detached",
                "the first at tap0",
                "1 of them could not be restored: cannot attach",
            ],
            ["1 pin was removed", ": /pins/v1/links/port-1-2-3", "; pinned again"],
            ["/pins leads elsewhere", ": `umount", "/pins`"],
            ["1 device of the hub was set down", ": imds-in", "; up again. Guests got no answer"],
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, parts) in lines.iter().zip(expected) {
            assert!(parts.iter().all(|part| line.contains(part)), "{line}: expected {parts:?}");
        }
    }

    #[test]
    fn pins_made_again_after_a_forced_release_are_no_fault_unless_that_fails() {
        let refused = || Err(SteerError::device("pin", io::Error::from_raw_os_error(libc::EROFS)));
        for (restores, is_restoring, fault, repaired, lines) in [
            (true, false, AttachmentFault::Unpinned, Ok(()), 0),
            (false, true, AttachmentFault::Unpinned, Ok(()), 0),
            (false, false, AttachmentFault::Unpinned, Ok(()), 1),
            (true, true, AttachmentFault::Unpinned, refused(), 1),
            (true, true, AttachmentFault::Detached, Ok(()), 1),
        ] {
            let mut checks = Checks { restores, is_restoring, ..Checks::default() };
            checks.note(fault, "/pins/v1/links/port-1-2-3", repaired);
            assert_eq!(checks.lines().len(), lines, "{restores} {is_restoring} {fault:?}");
        }
    }

    #[test]
    fn a_fault_counts_until_the_next_round_is_complete() {
        let mut checks = Checks::default();
        checks.note(AttachmentFault::Detached, "tap0", Ok(()));
        checks.former = std::mem::take(&mut checks.present);
        checks.last = Some(metadata_common::port::PortName::local("tap0"));
        assert_eq!(checks.lines().len(), 1, "the round is not complete");
        checks.last = None;
        assert_eq!(checks.lines(), [""; 0]);
        assert_eq!(checks.found.get(&AttachmentFault::Detached), Some(&1));
    }
}

//! Which program handles a port's frames: the XDP program, the classifier, or one after the other.
//!
//! XDP is the cheaper path to the service, but it makes every frame of many segments expensive: the kernel first
//! copies such a frame into one linear buffer. The classifier costs such a frame almost nothing (`cargo xtask
//! traffic`). By default a port therefore has XDP while its guest boots, and the classifier alone once the guest is
//! quiet.
//!
//! A switch neither loses a frame nor lets one through: the classifier is attached before XDP is detached, and stays.
//! While both are attached, XDP sees a frame first and takes the service's frames; either counts the frames that
//! pass.
//!
//! The classifier redirects by interface index within one namespace. A redirect to another namespace needs a device
//! map, which only XDP can use. From namespaces other than the hub's, the classifier therefore passes frames to the
//! worker through a ring (`hubs`). The ring costs the worker a copy. It carries only the few frames of a quiet
//! guest: a guest with many requests gets XDP in every namespace.

use aya::programs::Xdp;
use aya::programs::links::FdLink;
use metadata_common::maps::{PortKey, program};
use metadata_common::port::PortName;
use metadata_links::netns::{self, Cookie};
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::super::SteerError;
use super::super::attach::{self, AttachError, HeldLink, check_vacant};
use super::super::config::SteeringMode;
use super::super::devices::place;
use super::super::error::ProbeError;
use super::super::features::ProbeResult;
use super::super::maps::Maps;
use super::super::pins::{Pin, PinnedProgram};
use super::Attachments;

/// A guest counts as booted after this long without a busy period.
pub const QUIET: Duration = Duration::from_secs(30);
/// Frames per second for the service, averaged since the last check, above which a guest counts as booting. One poll
/// takes about ten; the shortest boot takes more than thirty.
pub const BUSY: u64 = 32;
/// Ports checked in one call of [`Steering::follow_guests`](crate::Steering::follow_guests), so that its cost does not
/// grow with the node: about 0.3 ms, 0.6 µs each.
pub const LOOKS_AT_ONCE: usize = 512;
/// Ports switched in one call, which blocks meanwhile. The first classifier of a port waits for an RCU grace period,
/// about 15 ms. The port keeps its classifier, so later switches take a fraction of a millisecond.
pub const SWITCHES_AT_ONCE: usize = 8;

/// Which program steers one port now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteeringProgram {
    /// The XDP program, with or without the classifier behind it.
    Xdp,
    /// The classifier alone.
    Tcx,
}

/// The programs on one port. On drop, pinned programs stay and others are detached.
pub(crate) struct Programs {
    xdp: Option<HeldLink>,
    tcx: Option<HeldLink>,
    /// Programs that were to be detached and may still be attached.
    remains: Vec<HeldLink>,
    watch: Watch,
}

/// State of a port at the last check.
struct Watch {
    steered: u64,
    looked: Option<Instant>,
    since: Option<Instant>,
    /// A switch failed and was logged. It is retried, but not logged again.
    is_logged: bool,
}

impl Programs {
    pub(crate) fn none() -> Self {
        Self { xdp: None, tcx: None, remains: Vec::new(), watch: Watch::new() }
    }

    /// Records a program as attached.
    pub(crate) fn put(&mut self, on: PinnedProgram, held: Option<HeldLink>) {
        match on {
            PinnedProgram::Tcx => self.tcx = held,
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => self.xdp = held,
        }
    }

    /// The kinds of program attached.
    pub(crate) fn on(&self) -> Vec<PinnedProgram> {
        let xdp = self.xdp.as_ref().map(|_| PinnedProgram::Xdp);
        xdp.into_iter().chain(self.tcx.as_ref().map(|_| PinnedProgram::Tcx)).collect()
    }

    /// True if no program is attached.
    pub(crate) fn is_none(&self) -> bool {
        self.xdp.is_none() && self.tcx.is_none()
    }

    /// Drops the links without removing their pins, so the programs stay attached.
    pub(crate) fn leave_to_pins(&mut self) {
        [&mut self.xdp, &mut self.tcx].into_iter().flatten().for_each(HeldLink::leave_to_pin);
    }

    /// The link of a program, if that is attached.
    pub(crate) fn held(&self, on: PinnedProgram) -> Option<&HeldLink> {
        match on {
            PinnedProgram::Tcx => self.tcx.as_ref(),
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => self.xdp.as_ref(),
        }
    }

    /// Like [`Programs::held`], to change it.
    pub(crate) fn held_mut(&mut self, on: PinnedProgram) -> Option<&mut HeldLink> {
        match on {
            PinnedProgram::Tcx => self.tcx.as_mut(),
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => self.xdp.as_mut(),
        }
    }

    /// Detaches one program.
    fn detach_one(&mut self, held: Option<HeldLink>) {
        self.remains.extend(held.and_then(HeldLink::detach_and_unpin));
    }

    /// Detaches the programs. Returns those that may still be attached.
    #[must_use = "numbers are free only after the detachment is proven"]
    pub(crate) fn detach_all(mut self) -> Vec<HeldLink> {
        for held in [self.xdp.take(), self.tcx.take()] {
            self.detach_one(held);
        }
        let again = std::mem::take(&mut self.remains);
        again.into_iter().filter_map(HeldLink::detach_and_unpin).collect()
    }

    /// True if the programs are those of a mode. Those of [`SteeringMode::Auto`] depend on the guest.
    fn are_of(&self, mode: SteeringMode) -> bool {
        match mode {
            SteeringMode::Auto => true,
            SteeringMode::Xdp => self.xdp.is_some() && self.tcx.is_none(),
            SteeringMode::Tcx => self.tcx.is_some() && self.xdp.is_none(),
        }
    }

    pub(crate) fn by(&self) -> SteeringProgram {
        if self.xdp.is_some() { SteeringProgram::Xdp } else { SteeringProgram::Tcx }
    }
}

impl Watch {
    fn new() -> Self {
        Self { steered: 0, looked: None, since: None, is_logged: false }
    }

    /// Returns the program that a port steered `by` should have, given the total of frames steered to the service.
    fn look(&mut self, by: SteeringProgram, steered: u64, now: Instant) -> SteeringProgram {
        let more = steered.wrapping_sub(self.steered);
        self.steered = steered;
        let seconds = now.saturating_duration_since(self.looked.replace(now).unwrap_or(now)).as_secs().max(1);
        if more >= BUSY.saturating_mul(seconds) {
            self.since = Some(now);
            return SteeringProgram::Xdp;
        }
        let quiet = now.saturating_duration_since(*self.since.get_or_insert(now));
        if quiet >= QUIET { SteeringProgram::Tcx } else { by }
    }
}

impl SteeringMode {
    /// The mode on a kernel of which `tcx` says whether it has such classifiers: [`SteeringMode::Auto`] is
    /// [`SteeringMode::Xdp`] on a kernel without them.
    pub(crate) fn on(self, tcx: &ProbeResult) -> Result<Self, SteerError> {
        match (self, tcx) {
            (Self::Auto, Ok(false) | Err(_)) => Ok(Self::Xdp),
            (Self::Tcx, Ok(false)) => Err(SteerError::NoTcx { found: "this kernel has none".into() }),
            // The kernel may have them: what is missing is a permission.
            (Self::Tcx, Err(ProbeError { errno: Some(errno @ (libc::EPERM | libc::EACCES)), .. })) => {
                Err(SteerError::device("ask for tcx classifiers", io::Error::from_raw_os_error(*errno)))
            }
            (Self::Tcx, Err(ProbeError { text, .. })) => {
                Err(SteerError::NoTcx { found: format!("the test for them failed ({text})") })
            }
            (mode, _) => Ok(mode),
        }
    }
}

impl Attachments {
    /// Attaches what the mode requires and detaches the rest; called in the port's namespace. Inherited programs are
    /// removed only once their replacement is attached.
    pub(crate) fn attach_programs(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        programs: &mut Programs,
    ) -> Result<(), SteerError> {
        if programs.is_none() {
            check_vacant(port)?;
        }
        let (wants_xdp, wants_tcx) = match self.mode {
            SteeringMode::Auto => (programs.is_none(), false),
            SteeringMode::Xdp => (true, false),
            SteeringMode::Tcx => (false, true),
        };
        if wants_tcx && programs.tcx.is_none() {
            programs.tcx = Some(self.put_tcx(port, cookie, key)?);
        }
        if wants_xdp && programs.xdp.is_none() {
            programs.xdp = Some(self.put_xdp(port, cookie, key)?);
        }
        let surplus = match self.mode {
            SteeringMode::Auto => None,
            SteeringMode::Xdp => programs.tcx.take(),
            SteeringMode::Tcx => programs.xdp.take(),
        };
        programs.detach_one(surplus);
        Ok(())
    }

    /// Attaches a program to a port; called in its namespace.
    pub(super) fn put(
        &mut self,
        on: PinnedProgram,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
    ) -> Result<HeldLink, SteerError> {
        match on {
            PinnedProgram::Tcx => self.put_tcx(port, cookie, key),
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => {
                self.put_xdp(port, cookie, key)
            }
        }
    }

    fn put_xdp(&mut self, port: &PortName, cookie: Cookie, key: PortKey) -> Result<HeldLink, SteerError> {
        let pin = self.pin_of(PinnedProgram::Xdp, cookie, key);
        let xdp: &mut Xdp = self.object.port(cookie)?;
        let link = attach::native_or_generic(xdp, key.ifindex, port)
            .map_err(|refusal: AttachError| refusal.about(program::PORT, port, key.ifindex))?;
        self.hold(cookie, link, pin)
    }

    fn put_tcx(&mut self, port: &PortName, cookie: Cookie, key: PortKey) -> Result<HeldLink, SteerError> {
        if !self.home.is_reached_from(cookie) {
            return Err(SteerError::TcxElsewhere { port: port.clone() });
        }
        let pin = self.pin_of(PinnedProgram::Tcx, cookie, key);
        let link = attach::tcx(self.object.classifier(cookie)?, program::PORT_TCX, port)?;
        self.hold(cookie, link, pin)
    }

    /// Keeps a new link. If it can neither be kept nor is it proven to be detached, the number of its namespace is
    /// retired.
    fn hold(&mut self, cookie: Cookie, link: FdLink, pin: Option<Pin>) -> Result<HeldLink, SteerError> {
        HeldLink::new(link, pin).inspect_err(|error| {
            if matches!(error, SteerError::StillAttached { .. }) {
                self.object.retire(cookie);
            }
        })
    }

    /// Switches a port to XDP or to the classifier alone, without losing a frame or letting one through; called in its
    /// namespace.
    ///
    /// # Errors
    /// If the port is not attached, its tap or namespace is gone, or the kernel refuses. The port is then steered as
    /// before.
    pub(crate) fn switch_inside(&mut self, port: &PortName, to: SteeringProgram) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port) else {
            return Err(SteerError::NotAttached { port: port.clone() });
        };
        if attached.programs.by() == to {
            return Ok(());
        }
        let (cookie, key) = (attached.cookie, attached.key);
        let has_tcx = attached.programs.tcx.is_some();
        let PortKey { ifindex, .. } = key;
        if netns::cookie()? != cookie || netns::index_of(&port.ifname)? != Some(ifindex) {
            return Err(SteerError::PortGone { port: port.clone(), found: "another device or none".into() });
        }
        let put = match to {
            SteeringProgram::Xdp => Some(self.put_xdp(port, cookie, key)?),
            SteeringProgram::Tcx if has_tcx => None,
            SteeringProgram::Tcx => Some(self.put_tcx(port, cookie, key)?),
        };
        if let Some(attached) = self.ports.get_mut(port) {
            let programs = &mut attached.programs;
            match to {
                SteeringProgram::Xdp => programs.xdp = put,
                SteeringProgram::Tcx => {
                    programs.tcx = put.or(programs.tcx.take());
                    let xdp = programs.xdp.take();
                    programs.detach_one(xdp);
                }
            }
        }
        self.unload_unused(cookie);
        tracing::debug!(%port, by = ?to, "switched the program of a port");
        Ok(())
    }

    /// Unloads the stub of a namespace in which XDP steers no port.
    fn unload_unused(&mut self, cookie: Cookie) {
        let mut attached = self.ports.values();
        if !attached.any(|attached| attached.cookie == cookie && attached.programs.xdp.is_some()) {
            self.object.unload_stub(cookie);
        }
    }

    /// Gives a port the programs of the mode, without losing a frame or letting one through; called in its namespace.
    /// After an error it is steered as before.
    fn conform_inside(&mut self, port: &PortName) -> Result<(), SteerError> {
        let now = place(port)?;
        let Some(attached) = self.ports.get_mut(port) else { return Ok(()) };
        let (cookie, key) = (attached.cookie, attached.key);
        if now != (cookie, Some(key.ifindex)) {
            return Err(SteerError::PortGone { port: port.clone(), found: "another device or none".into() });
        }
        let mut programs = std::mem::replace(&mut attached.programs, Programs::none());
        let conforms = self.attach_programs(port, cookie, key, &mut programs);
        if let Some(attached) = self.ports.get_mut(port) {
            attached.programs = programs;
        }
        conforms?;
        self.unload_unused(cookie);
        tracing::debug!(%port, mode = ?self.mode, "gave a port the program of the mode");
        Ok(())
    }

    /// Checks the next [`LOOKS_AT_ONCE`] ports and switches those whose guests have booted or boot again, at most
    /// [`SWITCHES_AT_ONCE`]. In a mode with one program it switches as many ports that an agent of another mode steered
    /// before a takeover.
    pub(crate) fn follow_guests(&mut self, now: Instant, maps: &Maps) {
        if self.mode != SteeringMode::Auto {
            for port in self.astray() {
                let netns = self.home.netns_of(&port);
                let switched = netns.and_then(|netns| netns.run(|| self.conform_inside(&port)));
                self.log_refused_switch(&port, switched);
            }
            return;
        }
        for (port, to) in self.due(now, maps) {
            let netns = self.home.netns_of(&port);
            let switched = netns.and_then(|netns| netns.run(|| self.switch_inside(&port, to)));
            self.log_refused_switch(&port, switched);
        }
    }

    /// Logs the first refusal to switch a port.
    fn log_refused_switch(&mut self, port: &PortName, switched: Result<(), SteerError>) {
        let Err(error) = switched else { return };
        if let Some(attached) = self.ports.get_mut(port)
            && !std::mem::replace(&mut attached.programs.watch.is_logged, true)
        {
            tracing::warn!("cannot switch the program of {port}, which is steered as before: {error}");
        }
    }

    /// The next ports whose programs are not those of the mode.
    fn astray(&mut self) -> Vec<PortName> {
        let after = self.last_examined.take().map_or(Unbounded, Excluded);
        let mode = self.mode;
        let all = self.ports.range((after, Unbounded)).filter(|(_, attached)| {
            !attached.gone && !attached.programs.is_none() && !attached.programs.are_of(mode)
        });
        let astray: Vec<PortName> = all.map(|(port, _)| port.clone()).take(SWITCHES_AT_ONCE).collect();
        // If there may be more, the next call goes on behind them; otherwise it begins again.
        self.last_examined = astray.last().filter(|_| astray.len() == SWITCHES_AT_ONCE).cloned();
        astray
    }

    /// The ports to switch, among those due for a check.
    fn due(&mut self, now: Instant, maps: &Maps) -> Vec<(PortName, SteeringProgram)> {
        let after = self.last_examined.take().map_or(Unbounded, Excluded);
        let mut due = Vec::new();
        for (looks, (name, attached)) in self.ports.range_mut((after, Unbounded)).enumerate() {
            if looks == LOOKS_AT_ONCE || due.len() == SWITCHES_AT_ONCE {
                break;
            }
            self.last_examined = Some(name.clone());
            let stays = !self.home.is_reached_from(attached.cookie);
            let by = attached.programs.by();
            let Some(steered) = (!stays).then(|| maps.steered(attached.key)).flatten() else {
                continue;
            };
            let to = attached.programs.watch.look(by, steered, now);
            if to != by {
                due.push((name.clone(), to));
            }
        }
        if self.ports.last_key_value().map(|(name, _)| name) == self.last_examined.as_ref() {
            self.last_examined = None;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::{BUSY, QUIET, SteerError, SteeringMode, SteeringProgram, Watch};
    use crate::error::ProbeError;
    use std::error::Error as _;
    use std::io;
    use std::time::{Duration, Instant};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_quiet_guest_counts_as_booted() {
        let (mut watch, start) = (Watch::new(), Instant::now());
        assert_eq!(watch.look(SteeringProgram::Xdp, 40, start), SteeringProgram::Xdp);
        assert_eq!(watch.look(SteeringProgram::Xdp, 40, start + QUIET - SECOND), SteeringProgram::Xdp);
        assert_eq!(
            watch.look(SteeringProgram::Xdp, 40 + BUSY, start + QUIET),
            SteeringProgram::Xdp,
            "it was busy meanwhile"
        );
        for second in 1..30 {
            let (asked, at) = (40 + BUSY + u64::from(second) * 10, QUIET + SECOND * second);
            assert_eq!(watch.look(SteeringProgram::Xdp, asked, start + at), SteeringProgram::Xdp, "{second}");
        }
        assert_eq!(
            watch.look(SteeringProgram::Xdp, 370, start + QUIET * 2),
            SteeringProgram::Tcx,
            "polling is quiet"
        );
    }

    #[test]
    fn a_guest_without_requests_counts_as_quiet() {
        let (mut watch, start) = (Watch::new(), Instant::now());
        assert_eq!(watch.look(SteeringProgram::Xdp, 0, start), SteeringProgram::Xdp);
        assert_eq!(watch.look(SteeringProgram::Xdp, 0, start + QUIET), SteeringProgram::Tcx);
    }

    #[test]
    fn only_many_requests_count_as_a_boot() {
        let (mut watch, start) = (Watch::new(), Instant::now());
        assert_eq!(watch.look(SteeringProgram::Tcx, BUSY - 1, start), SteeringProgram::Tcx);
        assert_eq!(watch.look(SteeringProgram::Tcx, 2 * BUSY - 2, start + SECOND), SteeringProgram::Tcx);
        assert_eq!(watch.look(SteeringProgram::Tcx, 3 * BUSY - 2, start + SECOND * 2), SteeringProgram::Xdp);
        assert_eq!(
            watch.look(SteeringProgram::Xdp, 3 * BUSY - 2, start + QUIET),
            SteeringProgram::Xdp,
            "quiet counts from then on"
        );
        assert_eq!(
            watch.look(SteeringProgram::Tcx, 6 * BUSY, start + QUIET + SECOND * 8),
            SteeringProgram::Tcx,
            "the limit is a rate"
        );
    }

    #[test]
    fn a_wrapped_count_is_an_increase() {
        let mut watch = Watch { steered: u64::MAX, ..Watch::new() };
        assert_eq!(watch.look(SteeringProgram::Tcx, BUSY - 1, Instant::now()), SteeringProgram::Xdp);
    }

    #[test]
    fn a_mode_follows_from_the_answer_of_the_kernel() {
        let unclear = || Err(ProbeError::new("not permitted"));
        for (mode, tcx, expected) in [
            (SteeringMode::Auto, Ok(true), Ok(SteeringMode::Auto)),
            (SteeringMode::Auto, Ok(false), Ok(SteeringMode::Xdp)),
            (SteeringMode::Auto, unclear(), Ok(SteeringMode::Xdp)),
            (SteeringMode::Xdp, Ok(true), Ok(SteeringMode::Xdp)),
            (SteeringMode::Xdp, Ok(false), Ok(SteeringMode::Xdp)),
            (SteeringMode::Xdp, unclear(), Ok(SteeringMode::Xdp)),
            (SteeringMode::Tcx, Ok(true), Ok(SteeringMode::Tcx)),
            (SteeringMode::Tcx, Ok(false), Err("this kernel has none")),
            (SteeringMode::Tcx, unclear(), Err("not permitted")),
        ] {
            match (mode.on(&tcx), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{mode:?} {tcx:?}"),
                (Err(error @ SteerError::NoTcx { .. }), Err(part)) => {
                    let text = error.to_string();
                    assert!(text.contains(part) && text.contains("steer: auto"), "{text}");
                }
                (found, _) => panic!("{mode:?} {tcx:?}: {found:?}"),
            }
        }
    }

    #[test]
    fn a_missing_permission_to_ask_for_classifiers_is_not_taken_for_their_absence() {
        for errno in [libc::EPERM, libc::EACCES] {
            let refused = Err(ProbeError::from(io::Error::from_raw_os_error(errno)));
            let error = SteeringMode::Tcx.on(&refused).expect_err("no permission");
            let text = error.to_string();
            assert!(text.contains("CAP_SYS_ADMIN") && !text.contains("steer: auto"), "{text}");
            let kind = error.source().and_then(|cause| Some(cause.downcast_ref::<io::Error>()?.kind()));
            assert_eq!(kind, Some(io::ErrorKind::PermissionDenied), "{text}");
        }
    }

    #[test]
    fn modes_parse_from_the_names_in_the_configuration() {
        for (text, mode) in
            [("xdp", SteeringMode::Xdp), ("tcx", SteeringMode::Tcx), ("auto", SteeringMode::Auto)]
        {
            assert_eq!(serde_yaml::from_str::<SteeringMode>(text).ok(), Some(mode));
        }
        assert_eq!(SteeringMode::default(), SteeringMode::Auto);
    }
}

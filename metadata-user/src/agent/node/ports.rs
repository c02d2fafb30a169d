//! The present state: attached ports, and the steps that bring them to the plan.

mod closing;
mod problems;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use metadata_common::maps::Slot;
use metadata_common::port::PortName;
use metadata_common::share::{ShareReport, Tenant};
use metadata_content::http::Response;
use metadata_datapath::worker::ControlError;
use metadata_feed::registry::RecordId;
use metadata_links::devices::{Changed, DeviceEvent};
use metadata_steer::{AnswerPath, DeviceLookup, SteerError, Steering};
use problems::{ABSENT, NO_NAMESPACE, PortProblems, PortShares, UNREACHABLE};
use tracing::{debug, info, warn};

use super::answers::AnswerPublisher;
use super::bindings::Bindings;
use super::catalogue::{RecordCatalogue, TouchedPorts};
use super::workers::Workers;
use crate::agent::plan::Plan;
use crate::agent::slots::IdentityName;
use crate::metrics::{self, BindHistogram};
use crate::service::HandedRequest;
pub(crate) use closing::TapGuard;

/// The ports of the node. Events touch ports; [`NodePorts::proceed`] brings touched ports to the plan.
pub(crate) struct NodePorts {
    steering: Steering,
    bindings: Bindings,
    /// Ports to settle.
    touched: BTreeSet<PortName>,
    /// Ports that the previous agent may have served. Their guests are answered before any port is attached. `None`
    /// before the first call of [`NodePorts::proceed`].
    inherited: Option<BTreeSet<PortName>>,
    troubles: PortProblems,
    attaching: AttachTimes,
    guard: TapGuard,
    shares: PortShares,
}

impl NodePorts {
    /// Creates the state without attached ports. The ports of the plan and the guarded taps of the agent's own
    /// namespace are touched.
    #[must_use]
    pub(crate) fn new(
        steering: Steering,
        answers: AnswerPublisher,
        workers: Workers,
        guard: TapGuard,
        plan: &Plan,
    ) -> Self {
        let mut ports = Self {
            bindings: Bindings::new(&steering, answers, workers),
            steering,
            touched: plan.ports().cloned().collect(),
            inherited: None,
            troubles: PortProblems::default(),
            attaching: AttachTimes::default(),
            guard,
            shares: PortShares::default(),
        };
        ports.touch_taps(None, plan);
        ports
    }

    #[must_use]
    pub(crate) fn steering(&self) -> &Steering {
        &self.steering
    }

    #[must_use]
    pub(super) fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    #[must_use]
    pub(super) fn attaching(&self) -> &AttachTimes {
        &self.attaching
    }

    #[must_use]
    pub(crate) fn workers(&self) -> &Workers {
        self.bindings.workers()
    }

    #[must_use]
    pub(crate) fn answers(&self) -> &AnswerPublisher {
        self.bindings.answers()
    }

    /// Number of ports attached.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.steering.attachments().port_count()
    }

    /// How tenants share ports and identities.
    #[must_use]
    pub(super) fn shares(&self) -> [ShareReport; 2] {
        [ShareReport::of("ports", self.shares.share()), ShareReport::of("identities", self.bindings.share())]
    }

    /// Number of identities bound.
    #[must_use]
    pub(crate) fn identity_count(&self) -> usize {
        self.bindings.count()
    }

    /// Checks that the packet path works, because the agent must not look alive without it.
    ///
    /// # Errors
    /// If a worker thread has ended, or a device of the hub was deleted.
    pub(crate) fn check_path(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            !self.workers().any_ended(),
            "a worker thread has stopped; see the log above, then restart"
        );
        match self.steering.hubs().are_whole() {
            Ok(whole) => {
                anyhow::ensure!(whole, "a device of the hub was deleted; restart to create it again")
            }
            Err(error) => warn!("checking the hub's devices: {error}"),
        }
        Ok(())
    }

    /// True while ports are touched.
    #[must_use]
    pub(crate) fn has_work(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Marks ports whose plan may have changed, so that they are settled.
    pub(crate) fn touch(&mut self, TouchedPorts { named, others }: TouchedPorts) {
        named.iter().for_each(|port| self.attaching.on_seen(port));
        // `append` would rebuild the whole set for each event.
        self.touched.extend(named.into_iter().chain(others));
    }

    /// Touches the ports of devices that appeared, vanished or changed in a namespace, under the old and the new name.
    pub(super) fn on_links_changed(&mut self, netns: Option<&str>, changed: &Changed, plan: &Plan) {
        match changed {
            Changed::Unknown => {
                for port in plan.ports().filter(|port| port.netns.as_deref() == netns) {
                    self.attaching.on_seen(port);
                    self.touched.insert(port.clone());
                }
                if let Err(error) = self.steering.inspect_mtus(netns) {
                    debug!(?netns, "reading MTUs: {error}");
                }
                self.touch_taps(netns, plan);
            }
            Changed::Devices(devices) => {
                devices.iter().for_each(|device| self.on_device_changed(netns, device, plan));
            }
        }
    }

    fn on_device_changed(&mut self, netns: Option<&str>, device: &DeviceEvent, plan: &Plan) {
        self.steering.attachments_mut().mark_deleted(device);
        if netns.is_none() {
            self.steering.note_device(device);
        }
        if let Err(error) = self.steering.update_mtu(device) {
            warn!("{error}");
        }
        let named = PortName { ifname: device.name.clone(), netns: netns.map(str::to_owned) };
        let attached = self.steering.attachments().port_of(device).cloned();
        if plan.wants(&named) {
            self.attaching.on_seen(&named);
        }
        let touched = Some(named).filter(|port| plan.wants(port) || self.guard.guards(port, plan));
        self.touched.extend(attached.into_iter().chain(touched));
    }

    /// Touches ports that could not be settled, and repeats wake-ups that failed.
    pub(crate) fn retry(&mut self) {
        let steering = &self.steering;
        self.shares.retain(|port| steering.attachments().is_attached(port));
        self.touched.extend(self.troubles.take_unsettled());
        self.bindings.retry_wakes();
    }

    /// Switches ports to the program that costs their guests least now, and touches ports whose device has changed.
    pub(super) fn follow_guests(&mut self, now: Instant) {
        self.steering.follow_guests(now);
        self.touched.extend(self.steering.inspect_devices());
    }

    /// Compares links, programs and pins of the next ports with the kernel's view of them, and restores what somebody
    /// else has taken away. Nothing happens between two rounds, and during a takeover.
    pub(super) fn check_attachments(&mut self, now: Instant) {
        self.steering.check(now);
    }

    /// Compares at once if the pins were removed or are hidden.
    pub(crate) fn check_pins(&mut self, now: Instant) {
        self.steering.check_pins(now);
    }

    /// Pins everything, for the next agent.
    pub(crate) fn pin_everything(&mut self, now: Instant) {
        self.steering.check_all(now);
    }

    /// Makes the next check begin at once.
    pub(super) fn check_attachments_soon(&mut self) {
        self.steering.check_soon();
    }

    /// Applies the limits of the configuration to all ports.
    pub(super) fn set_limits(&mut self, limits: metadata_steer::PortLimits) {
        if limits != self.steering.maps().limits()
            && let Err(error) = self.steering.set_limits(limits)
        {
            warn!("not all ports have the new limits: {error}; the next reload tries again");
        }
    }

    /// Settles touched ports for at most `for_at_most`. A failure is logged once and retried later. Guests of the
    /// previous agent come first, because they may have sent requests already.
    pub(super) fn proceed(&mut self, for_at_most: Duration, catalogue: &mut RecordCatalogue) {
        let start = Instant::now();
        self.answer_inherited(start, for_at_most, catalogue);
        while start.elapsed() < for_at_most
            && let Some(port) = self.touched.pop_first()
        {
            self.troubles.begin(&port);
            self.settle(&port, catalogue);
            self.troubles.end(&port);
            self.attaching.log_progress(self.touched.len(), self.steering.attachments().port_count());
        }
        if self.touched.is_empty() {
            self.troubles.log_absent();
        }
    }

    /// Publishes responses for guests of the previous agent, until all are published or the time is over.
    fn answer_inherited(&mut self, start: Instant, for_at_most: Duration, catalogue: &mut RecordCatalogue) {
        let all = || {
            let all = self.steering.takeover().has_inherited().then(|| catalogue.plan().ports().cloned());
            all.into_iter().flatten().collect()
        };
        let inherited = self.inherited.get_or_insert_with(all);
        while start.elapsed() < for_at_most
            && let Some(port) = inherited.pop_first()
        {
            self.bindings.answer_inherited(&mut self.steering, &port, catalogue);
        }
    }

    /// Brings one port to the plan.
    fn settle(&mut self, port: &PortName, catalogue: &mut RecordCatalogue) {
        let (start, rendering) = (Instant::now(), catalogue.rendering());
        if !catalogue.plan().wants(port) {
            return self.settle_unwanted(port, catalogue.plan());
        }
        self.bindings.unbind_on(&mut self.steering, port, |who| !catalogue.plan().knows(who));
        if self.steering.attachments().is_attached(port)
            && matches!(self.steering.attachments().find(port), Ok(DeviceLookup::Other))
        {
            // The tap was deleted and created again: the new one begins like any other.
            self.detach(port);
        }
        let is_new = !self.steering.attachments().is_attached(port);
        // Bind before a program is attached or a closed port is opened: the first frame of the guest must find its
        // identity.
        let is_prepared = is_new && self.admit(port, catalogue.plan()) && self.prepare(port);
        if is_prepared {
            self.serve_speakers(port, catalogue);
        }
        if !self.attach(port, catalogue.plan()) {
            if is_prepared {
                self.give_up(port);
            }
            return self.bindings.answer_inherited(&mut self.steering, port, catalogue);
        }
        if is_new && !is_prepared {
            self.bindings.keep_inherited(&mut self.steering, port, catalogue.plan());
        }
        if !is_prepared {
            self.serve_speakers(port, catalogue);
        }
        if !self.open(port) {
            return self.bindings.answer_inherited(&mut self.steering, port, catalogue);
        }
        if self.steering.attachments().answer_path(port) == AnswerPath::None {
            self.troubles.report(port, UNREACHABLE);
        }
        self.attaching.on_served(port, is_new);
        if is_new {
            self.attaching.on_attached(start.elapsed().saturating_sub(catalogue.rendering() - rendering));
        }
    }

    /// Prepares a new port, so that identities can be bound on it before it is attached. An error is left to the
    /// attempt to attach it, which has the same.
    fn prepare(&mut self, port: &PortName) -> bool {
        // Steering detaches renamed devices, so identities may be bound on a port that is not attached.
        self.bindings.unbind_on(&mut self.steering, port, |_| true);
        self.steering.prepare(port).unwrap_or_else(|error| {
            debug!(%port, "its guests are bound once it is attached: {error}");
            false
        })
    }

    /// Ends the preparation of a port that cannot be attached.
    fn give_up(&mut self, port: &PortName) {
        self.shares.release(port);
        self.bindings.unbind_on(&mut self.steering, port, |_| true);
        if let Err(error) = self.steering.detach(port) {
            warn!(%port, "undoing an attempt to attach it: {error}");
        }
    }

    /// Serves the identities of a port.
    fn serve_speakers(&mut self, port: &PortName, catalogue: &mut RecordCatalogue) {
        let speakers: Vec<_> =
            catalogue.plan().speakers(port).map(|(who, id)| (who.clone(), id.cloned())).collect();
        for (who, id) in speakers {
            self.serve(&who, id.as_ref(), catalogue);
        }
    }

    fn settle_unwanted(&mut self, port: &PortName, plan: &Plan) {
        self.attaching.on_absent(port);
        if self.guard.guards(port, plan) {
            return self.close(port, plan);
        }
        self.troubles.forget(port);
        self.release_unguarded(port, plan);
    }

    fn serve(&mut self, who: &IdentityName, id: Option<&RecordId>, catalogue: &mut RecordCatalogue) {
        let responses = id.and_then(|id| catalogue.responses(id));
        let record = id.and_then(|id| catalogue.record(id)).map(AsRef::as_ref);
        let tenant = id.map_or(Tenant::Operator, RecordId::tenant);
        if let Err(reason) = self.bindings.serve(&mut self.steering, (who, &tenant), responses, record) {
            self.troubles.report(&who.port, &reason);
        }
    }

    /// Attaches a port; true if it is attached.
    fn attach(&mut self, port: &PortName, plan: &Plan) -> bool {
        match self.steering.attachments().find(port) {
            Ok(DeviceLookup::Attached) => return true,
            Ok(DeviceLookup::Other) => {
                // The tap was deleted and created again: another device has the old name.
                if !self.steering.attachments().is_prepared(port) {
                    self.detach(port);
                    if !self.admit(port, plan) {
                        return false;
                    }
                }
                match self.steering.attach(port) {
                    Ok(()) => {
                        self.troubles.forget(port);
                        info!(%port, "attached");
                        return true;
                    }
                    Err(SteerError::SamePort { other, .. }) if self.rename_closed(port, &other) => {
                        return true;
                    }
                    Err(error @ SteerError::TakingOver { .. }) => {
                        self.troubles.wait(port, &error.to_string())
                    }
                    // The tap went while it was attached.
                    Err(error) if error.is_device_gone() => {
                        self.attaching.on_absent(port);
                        self.troubles.wait_for_device(port, ABSENT);
                    }
                    Err(error) => self.troubles.report(port, &error.to_string()),
                }
            }
            Ok(found @ (DeviceLookup::Nothing | DeviceLookup::NoNamespace)) => {
                self.detach(port);
                self.attaching.on_absent(port);
                let reason = if found == DeviceLookup::Nothing { ABSENT } else { NO_NAMESPACE };
                self.troubles.wait_for_device(port, reason);
            }
            Err(error) => self.troubles.report(port, &error.to_string()),
        }
        false
    }

    /// Counts a port in its tenant's share; true if that has room for it.
    fn admit(&mut self, port: &PortName, plan: &Plan) -> bool {
        let admitted = self.shares.admit(port, plan.tenant_of(port));
        if let Err(error) = &admitted {
            let reason =
                format!("too many ports on this node: {error}; move VMs of this tenant to other nodes");
            self.troubles.report(port, &reason);
        }
        admitted.is_ok()
    }

    /// Unbinds the identities of a port and detaches it, if it is attached.
    fn detach(&mut self, port: &PortName) {
        self.shares.release(port);
        // Steering detaches renamed devices, so identities may be bound on a port that is not attached.
        self.bindings.unbind_on(&mut self.steering, port, |_| true);
        if !self.steering.attachments().is_attached(port) {
            return;
        }
        match self.steering.detach(port) {
            Ok(()) => info!(%port, "detached"),
            Err(error) => warn!(%port, "detaching: {error}"),
        }
    }
}

/// Number of latest attachments in the median.
const REMEMBERED: usize = 4_096;
/// How often progress is logged.
const PROGRESS: Duration = Duration::from_secs(1);

/// Durations of attachments since the start.
#[derive(Debug, Default)]
pub(super) struct AttachTimes {
    count: u64,
    total: Duration,
    last: VecDeque<Duration>,
    /// When progress was last logged or the pass began; `None` between passes.
    logged: Option<Instant>,
    /// When wanted taps were first seen, until they are attached.
    seen: HashMap<PortName, Instant>,
    lag: BindHistogram,
}

impl AttachTimes {
    /// Counts a port that was attached and whose guests were bound. `time` excludes rendering.
    pub(super) fn on_attached(&mut self, time: Duration) {
        self.count += 1;
        self.total += time;
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(time);
    }

    /// Begins the wait of a wanted port that is about to be settled, unless the wait has begun.
    pub(super) fn on_seen(&mut self, port: &PortName) {
        if !self.seen.contains_key(port) {
            self.seen.insert(port.clone(), Instant::now());
        }
    }

    /// Ends the wait of a port whose tap does not exist or is no longer wanted. The wait is not counted.
    pub(super) fn on_absent(&mut self, port: &PortName) {
        self.seen.remove(port);
    }

    /// Ends the wait of a port whose guests are served. The wait is counted if the port is newly attached.
    pub(super) fn on_served(&mut self, port: &PortName, is_new: bool) {
        if let Some(seen) = self.seen.remove(port)
            && is_new
        {
            self.lag.waited(seen.elapsed());
        }
    }

    /// Logs the progress of a pass every [`PROGRESS`]. The pass ends when no port is left.
    pub(super) fn log_progress(&mut self, left: usize, attached: usize) {
        if left == 0 {
            self.logged = None;
        } else if self.logged.get_or_insert_with(Instant::now).elapsed() >= PROGRESS {
            self.logged = Some(Instant::now());
            info!(attached, left, "attaching ports");
        }
    }

    pub(super) fn figures(&self) -> metrics::AttachHistogram {
        let mut last: Vec<_> = self.last.iter().copied().collect();
        let middle = last.len() / 2;
        let median = if last.is_empty() { Duration::ZERO } else { *last.select_nth_unstable(middle).1 };
        metrics::AttachHistogram { count: self.count, total: self.total, median, lag: self.lag }
    }
}

// Takes ports over from the previous agent, and hands them over to the next agent.

impl NodePorts {
    /// The side of this agent's hubs, 0 or 1.
    #[must_use]
    pub(crate) fn side(&self) -> u32 {
        self.steering.hubs().side()
    }

    /// True while inherited ports remain that have not been attached.
    #[must_use]
    pub(crate) fn has_inherited(&self) -> bool {
        self.steering.takeover().has_inherited()
    }

    /// Releases inherited ports and slots that no record names. Call it once all ports were settled. Releases nothing
    /// while the device of a wanted port cannot be determined.
    pub(crate) fn release_inherited(&mut self, plan: &Plan) {
        if !self.has_inherited() || self.touch_inherited_taps(plan) {
            return;
        }
        let wanted = self.troubles.unsettled().filter(|port| plan.wants(port));
        match self.steering.release_inherited(wanted) {
            Ok(freed) => {
                freed.into_iter().for_each(|slot| self.bindings.release_inherited(&self.steering, slot))
            }
            Err(error) => debug!("ports of the previous agent stay closed: {error}"),
        }
    }

    /// Takes the ports over from the agent that has them. Identities keep their slots. Identities that the plan does
    /// not have are unbound, and missing identities are bound.
    ///
    /// # Errors
    /// If the kernel refuses a change. Another attempt is useful.
    pub(crate) fn take_over(&mut self, plan: &Plan) -> Result<(), SteerError> {
        self.bindings.follow_slots(&mut self.steering)?;
        self.steering.take_over_all()?;
        // The limits in the kernel are still those of the previous agent's configuration.
        self.steering.set_limits(self.steering.maps().limits())?;
        self.bindings.reserve_inherited(&self.steering);
        for port in plan.ports() {
            self.bindings.keep_inherited(&mut self.steering, port, plan);
            self.touched.insert(port.clone());
        }
        // What had to wait is closed now, and the other agent may have opened what was closed when it was claimed.
        self.touched.extend(self.troubles.take_unsettled());
        let closed: Vec<_> = self.closed().cloned().collect();
        self.touched.extend(closed);
        Ok(())
    }

    /// Completes a takeover once the previous agent has ended.
    ///
    /// # Errors
    /// If the kernel refuses a change. Another attempt is useful.
    pub(crate) fn finish_take_over(&mut self) -> Result<(), SteerError> {
        self.steering.finish_take_over()
    }

    /// Answers a question that the previous agent passed on; `None` while no answer is known.
    pub(crate) fn answer(&mut self, question: &HandedRequest) -> Option<Response> {
        self.bindings.answer(&self.steering, question)
    }

    /// Drains every worker for at most `limit`. Each worker claims its present connections and those that begin later.
    ///
    /// # Errors
    /// If no file descriptor is available, or a worker cannot be reached. The workers before it drain nevertheless.
    pub(crate) fn drain_and_claim(&self, limit: Duration) -> anyhow::Result<()> {
        self.workers().drain_and_claim(limit, || self.steering.maps().claims())
    }

    /// Ends the drain and drops all claims: this agent keeps its ports.
    ///
    /// # Errors
    /// If a worker cannot be reached. It continues to drain.
    pub(crate) fn resume(&mut self) -> Result<(), ControlError> {
        if let Err(error) = self.steering.maps_mut().clear_claims() {
            warn!("claims stay until the next handover: {error}");
        }
        self.workers().resume()
    }

    /// Records that the next agent has taken the ports.
    pub(crate) fn on_handed_over(&mut self) {
        self.steering.leave_to_pins();
    }

    /// Makes the worker try waiting requests of a slot again.
    pub(crate) fn wake(&mut self, slot: Slot) {
        self.bindings.wake(&self.steering, slot);
    }

    /// Ends this agent's part after the next agent has taken over. Nothing changes on the ports.
    pub(crate) fn leave(self) {
        let Self { bindings, steering, .. } = self;
        // Drop the workers first, because they use what steering closes.
        drop(bindings);
        steering.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{AttachTimes, REMEMBERED};

    #[test]
    fn the_median_is_of_the_last_attachments_and_the_sum_of_all() {
        let mut attaching = AttachTimes::default();
        assert_eq!(attaching.figures().median, Duration::ZERO);
        attaching.on_attached(Duration::from_secs(1));
        for _ in 0..REMEMBERED {
            attaching.on_attached(Duration::from_millis(2));
        }
        let figures = attaching.figures();
        assert_eq!((figures.count, figures.median), (REMEMBERED as u64 + 1, Duration::from_millis(2)));
        assert_eq!(figures.total, Duration::from_millis(1_000 + 2 * REMEMBERED as u64));
        assert_eq!(attaching.last.len(), REMEMBERED);
    }
}

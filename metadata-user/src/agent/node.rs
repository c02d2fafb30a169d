//! The node: the wanted state ([`RecordCatalogue`]), the present state ([`NodePorts`]), and reports on both
//! ([`Reporter`]).
//!
//! Each part owns its state. A method of [`Node`] needs more than one part.

mod answers;
mod bindings;
mod catalogue;
mod ports;
mod reporter;
mod view;
mod workers;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_content::record::event::EventRefused;
use metadata_content::source::RecordSource;
use metadata_control::instances::Instance;
use metadata_control::status::{AgentStatus, PortFilter};
use metadata_control::top::{Top, TopQuery};
use metadata_feed::FeedEvent;
use metadata_feed::registry::RecordId;
use metadata_feed::source::ServiceSender;
use metadata_links::devices::Changed;
use metadata_steer::SteerError;
use tokio::sync::oneshot;
use tracing::warn;

use super::health::Health;
use crate::config::Config;
pub(super) use answers::AnswerPublisher;
pub(super) use catalogue::{
    ChangedEvents, ClearedData, EventChange, RecordCatalogue, RegistrationConfig, RegistrationConflict,
    TaggedRecord, etag,
};
pub(super) use ports::{NodePorts, TapGuard};
pub(super) use reporter::Reporter;
use view::VmReport;
pub(super) use view::{NodeView, StartedTrace, TraceRefusal, TraceTarget, name_of};
use workers::WaitingClients;
pub(super) use workers::Workers;

/// The state of the control side.
pub(super) struct Node {
    /// The present state.
    pub(super) ports: NodePorts,
    /// The wanted state.
    pub(super) catalogue: RecordCatalogue,
    /// Reports on both.
    pub(super) reporter: Reporter,
    waiting: WaitingClients,
    /// The MACs without a record, by their port, that the log has named.
    logged_macs: BTreeSet<(PortName, Mac)>,
    /// Where sources learn how their records are served.
    pub(super) services: Vec<ServiceSender>,
}

impl Node {
    #[must_use]
    pub(super) fn new(catalogue: RecordCatalogue, ports: NodePorts, reporter: Reporter) -> Self {
        Self {
            ports,
            catalogue,
            reporter,
            waiting: WaitingClients::default(),
            logged_macs: BTreeSet::new(),
            services: Vec::new(),
        }
    }

    /// Saves state and frees memory that is no longer used. Call it about once a minute.
    pub(super) fn tend(&mut self) {
        // The answers hold payloads. Once they let go, the catalogue frees those that no record has.
        self.ports.answers().sweep();
        self.catalogue.tend();
    }

    /// Applies an event of a source.
    pub(super) fn on_event(&mut self, source: RecordSource, event: FeedEvent) {
        self.ports.touch(self.catalogue.on_event(source, event));
    }

    /// Sets where registered records are stored, and registers the records stored there.
    pub(super) fn set_shelf(&mut self, shelving: RegistrationConfig) {
        self.ports.touch(self.catalogue.set_shelf(shelving));
    }

    /// Registers a record, and replaces the record of that name.
    pub(super) fn register(&mut self, id: &RecordId, tagged: TaggedRecord) {
        self.ports.touch(self.catalogue.register(id, tagged));
    }

    /// Removes the record that is registered under a name, and drops the replies of clients that wait for it.
    pub(super) fn unregister(&mut self, id: &RecordId) {
        self.waiting.forget(id);
        self.ports.touch(self.catalogue.unregister(id));
    }

    /// Changes or reads the events of a record's VM. `None` if there is no such record.
    pub(super) fn change_events(
        &mut self,
        id: &RecordId,
        change: EventChange,
    ) -> Option<Result<ChangedEvents, EventRefused>> {
        let (done, touched) = self.catalogue.change_events(id, change)?;
        self.ports.touch(touched);
        Some(done)
    }

    /// Replies once all ports of a record are attached; drops the reply if the record is removed before.
    pub(super) fn wait_for(&mut self, id: RecordId, reply: oneshot::Sender<Instance>) {
        self.waiting.push(id, reply);
        self.notify_waiting();
    }

    /// Replies to clients whose records are served. Call it after ports have changed.
    pub(super) fn notify_waiting(&mut self) {
        let view = NodeView { catalogue: &self.catalogue, ports: &self.ports };
        self.waiting.notify(|id| view.instance(id));
    }

    /// Applies the fields of the configuration that can change: ports, limits, and the age of token keys.
    pub(super) fn configure(&mut self, config: &Config) {
        self.ports.touch(self.catalogue.configure(config));
        self.ports.set_limits(config.limits);
        self.catalogue.log_new_conflicts();
        self.catalogue.limit_registered(config.record_limits(), config.api().instances);
    }

    /// Devices of a namespace appeared, vanished or changed.
    pub(super) fn on_links_changed(&mut self, netns: Option<&str>, changed: &Changed) {
        self.ports.on_links_changed(netns, changed, self.catalogue.plan());
    }

    /// Settles touched ports for at most `for_at_most`.
    pub(super) fn proceed(&mut self, for_at_most: Duration) {
        self.ports.proceed(for_at_most, &mut self.catalogue);
    }

    /// Measures the load of workers, and switches ports to the program that costs their guests least now.
    pub(super) fn follow_guests(&mut self, now: Instant) {
        self.reporter.note_loads(self.ports.workers());
        self.ports.follow_guests(now);
        self.ports.check_attachments(now);
        self.log_mac_mismatches();
    }

    /// Logs each MAC that no record has on its port, once until it is no longer noticed there.
    fn log_mac_mismatches(&mut self) {
        let now = self.view().mac_mismatches();
        let logged = std::mem::take(&mut self.logged_macs);
        for (port, sender) in
            now.iter().filter(|(port, sender)| !logged.contains(&(port.clone(), sender.mac)))
        {
            warn!("{}", self.view().mac_mismatch(port, *sender));
        }
        self.logged_macs = now.into_iter().map(|(port, sender)| (port, sender.mac)).collect();
    }

    /// Tells sources how their records are served.
    pub(super) fn tell_services(&self) {
        for (source, services) in &self.services {
            let now = self.view().services(*source);
            services.send_if_modified(|told| {
                let is_new = *told != now;
                *told = now;
                is_new
            });
        }
    }

    /// Compares everything that is attached and pinned with what the kernel has, now instead of at the next tick.
    pub(super) fn check_attachments(&mut self, now: Instant) {
        self.ports.check_attachments_soon();
        self.ports.check_attachments(now);
    }

    /// Releases inherited ports and slots that no record names. Call it once all ports were settled.
    pub(super) fn release_inherited(&mut self) {
        self.ports.release_inherited(self.catalogue.plan());
    }

    /// Reads token keys, mailboxes and registered records again after the previous agent has saved them.
    pub(super) fn reload_state(&mut self) {
        self.ports.touch(self.catalogue.reload_state());
    }

    /// Takes the ports over from the agent that has them.
    ///
    /// # Errors
    /// If the kernel refuses a change. Another attempt may succeed.
    pub(super) fn take_over(&mut self) -> Result<(), SteerError> {
        self.ports.take_over(self.catalogue.plan())
    }

    /// Returns a read-only view of catalogue and ports.
    #[must_use]
    pub(super) fn view(&self) -> NodeView<'_> {
        NodeView { catalogue: &self.catalogue, ports: &self.ports }
    }

    /// The status of the node.
    #[must_use]
    pub(super) fn status(&self, about: PortFilter, health: &Health) -> AgentStatus {
        self.reporter.status(self.view(), about, health)
    }

    /// The live view of the node. The agent follows guests for a while after each call.
    #[must_use]
    pub(super) fn top(&self, query: &TopQuery, health: &Health) -> Top {
        self.reporter.top(self.view(), query, health)
    }

    /// The pages of the VMs with a name.
    #[must_use]
    pub(super) fn vm_pages(&self, name: &str) -> Vec<VmReport> {
        self.ports.answers().follow(Instant::now(), |following| self.view().vm_pages(name, following))
    }

    /// Takes the answers that workers have recorded, and reads counters for viewers.
    pub(super) fn collect(&self) {
        self.ports.answers().collect();
        self.reporter.sample(self.view());
    }

    /// The metrics, as exposition text.
    #[must_use]
    pub(super) fn metrics(&self, health: &Health) -> String {
        self.reporter.metrics(self.view(), health)
    }
}

/// Formats a port as on the command line.
fn port_text(port: &PortName) -> String {
    match &port.netns {
        Some(netns) => format!("{}@{netns}", port.ifname),
        None => port.ifname.clone(),
    }
}

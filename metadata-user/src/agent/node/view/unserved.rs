//! VMs that have a record and are not served from it, and why.

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_content::record::Record;
use metadata_control::status::{GuestState, GuestStatus, GuestWay, LISTED_GUESTS};
use metadata_control::top::{BootStage, VmPage, VmRow};
use metadata_feed::RejectedVm;
use metadata_feed::registry::{RecordId, RecordStanding};

use super::guests::is_port;
use super::{NodeView, way_of};
use crate::agent::node::port_text;

/// A NIC that is not served from its record; without a MAC, the record has no such NIC, or a port has no record.
#[derive(Debug)]
pub(super) struct UnservedNic<'a> {
    pub(super) id: Option<&'a RecordId>,
    record: Option<&'a Record>,
    /// The VM of a record that is refused from the start.
    rejected: Option<&'a RejectedVm>,
    pub(super) mac: Option<Mac>,
    port: Option<PortName>,
    /// Why, and what to do.
    pub(super) reason: String,
}

impl UnservedNic<'_> {
    fn port(&self) -> String {
        self.port.as_ref().map(port_text).unwrap_or_default()
    }

    fn mac(&self) -> String {
        self.mac.as_ref().map(Mac::to_string).unwrap_or_default()
    }

    fn vm_name(&self) -> Option<String> {
        let rejected = || self.rejected.map(|vm| vm.name.clone());
        self.record.map(|record| record.vm.name.to_string()).or_else(rejected)
    }

    fn uuid(&self) -> Option<String> {
        let rejected = || self.rejected.map(|vm| vm.uuid.clone()).filter(|uuid| !uuid.is_empty());
        self.record.map(|record| record.vm.uuid.as_str().to_owned()).or_else(rejected)
    }

    /// As `xdp-imds status` shows it.
    pub(super) fn guest(&self) -> GuestStatus {
        GuestStatus {
            port: self.port(),
            mac: self.mac(),
            record: self.id.map(RecordId::to_string),
            vm: self.vm_name(),
            uuid: self.uuid(),
            owner: self.record.map(|record| record.owner_text().to_owned()),
            state: GuestState::Unserved,
            reason: Some(self.reason.clone()),
            problem: None,
            slot: None,
            hub: None,
            program: None,
            way: self.port.as_ref().map_or(GuestWay::Device, way_of),
            held: None,
            events: Vec::new(),
        }
    }

    /// As `xdp-imds top` shows it.
    pub(super) fn page(&self) -> VmPage {
        let row = VmRow {
            vm: self.vm_name(),
            uuid: self.uuid(),
            port: self.port(),
            mac: self.mac(),
            stage: BootStage::Unattached,
            waits_for: Some(self.reason.clone()),
            ..VmRow::default()
        };
        VmPage { row, record: self.id.map(RecordId::to_string), ..VmPage::default() }
    }
}

impl<'a> NodeView<'a> {
    /// The NICs known by a name that no record serves there, [`LISTED_GUESTS`] at most. The name is one of those that
    /// [`NodeView::guests`] takes.
    pub(super) fn unserved(self, name: &str) -> Vec<UnservedNic<'a>> {
        let mac = name.parse::<Mac>().ok();
        let ids = self.catalogue.registry().ids();
        let nics = ids.flat_map(|id| {
            let is_vm = self.is_vm(name, id);
            let is_meant = is_vm || self.has_nic(id, name, mac);
            // Who asks for the VM, and not for this record, means the record in force.
            let is_other = match self.catalogue.registry().standing(id) {
                Some(RecordStanding::Shadowed { by }) => {
                    self.is_vm(name, &by) || self.has_nic(&by, name, mac)
                }
                _ => false,
            };
            let nics = if is_meant && !is_other { self.unserved_nics(id) } else { Vec::new() };
            let is_called = move |nic: &UnservedNic<'_>| {
                is_vm
                    || mac.is_some() && nic.mac == mac
                    || nic.port.as_ref().is_some_and(|port| is_port(name, port))
            };
            nics.into_iter().filter(is_called)
        });
        let closed = self.ports.closed().filter(|port| is_port(name, port)).map(|port| UnservedNic {
            id: None,
            record: None,
            rejected: None,
            mac: None,
            port: Some(port.clone()),
            reason: "no record has a NIC on this port, and `guard: all` keeps it closed; register the VM"
                .into(),
        });
        nics.chain(closed).take(LISTED_GUESTS).collect()
    }

    fn has_nic(self, id: &RecordId, name: &str, mac: Option<Mac>) -> bool {
        let Some(record) = self.catalogue.registry().record(id) else { return false };
        record.network.nics.iter().any(|nic| {
            mac.is_some() && nic.mac.map(|mac| mac.0) == mac
                || nic.port.as_ref().is_some_and(|port| is_port(name, &port.into()))
        })
    }

    fn unserved_nics(self, id: &'a RecordId) -> Vec<UnservedNic<'a>> {
        let registry = self.catalogue.registry();
        let record = registry.record(id).map(|record| &**record);
        let rejected = registry.rejected_vm(id);
        let nic = |mac, port, reason| UnservedNic { id: Some(id), record, rejected, mac, port, reason };
        let all = |reason: &str| -> Vec<_> {
            let nics = record.into_iter().flat_map(|record| &record.network.nics);
            let nics = nics.filter_map(|of| Some((of.mac?.0, of.port.as_ref().map(PortName::from))));
            let nics: Vec<_> = nics.map(|(mac, port)| nic(Some(mac), port, reason.to_owned())).collect();
            if nics.is_empty() { vec![nic(None, None, reason.to_owned())] } else { nics }
        };
        match registry.standing(id) {
            None => return Vec::new(),
            Some(RecordStanding::Rejected) => {
                return all(&format!("its record is refused: {}", registry.refusal(id).unwrap_or_default()));
            }
            Some(RecordStanding::Shadowed { by }) => {
                return all(&format!(
                    "{by} is in force for this VM, because its source has precedence; remove one of them"
                ));
            }
            Some(RecordStanding::InForce) => {}
        }
        let plan = self.catalogue.plan();
        let mut has_place = false;
        let mut nics = Vec::new();
        for (who, has) in plan.claims(id) {
            has_place = true;
            if let Some(holder) = plan.holder(who).filter(|_| !has) {
                let reason =
                    format!("{holder} has this MAC on this port; give one of the NICs another MAC or port");
                nics.push(nic(Some(who.mac), Some(who.port.clone()), reason));
            }
        }
        let macs = record.into_iter().flat_map(|record| &record.network.nics).filter_map(|nic| nic.mac);
        for mac in macs.map(|mac| mac.0) {
            if let Some(ports) = plan.candidates(id, mac) {
                has_place = true;
                let reason =
                    format!("this MAC is configured on {ports} ports; name the NIC's port in the record");
                nics.push(nic(Some(mac), None, reason));
            }
        }
        if has_place {
            return nics;
        }
        all("no port is known for this NIC; name the port in the record, or configure one with this MAC")
    }
}

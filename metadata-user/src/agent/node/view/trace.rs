//! Starts a trace of one guest.

use std::collections::HashMap;

use axum::http::StatusCode;
use metadata_common::mac::Mac;
use metadata_common::maps::{PortKey, Slot};

use super::{NodeView, UnservedNic};
use crate::agent::node::port_text;
use crate::agent::slots::IdentityName;
use metadata_common::port::PortName;
use metadata_steer::{TraceError, TraceSession};

/// Maximum number of ports or guests that a refusal lists if a name is ambiguous.
const LISTED: usize = 4;
/// The note on what the trace of a port does not show.
const NOT_BY_PORT: &str = "the agent's answers are not shown, because they carry a guest's slot instead of \
     a port: trace the guest's MAC to see them";

/// The target and scope of a trace.
#[derive(Clone, Debug)]
pub(crate) struct TraceTarget {
    /// A port, a MAC, or the name, UUID or record of a VM with one NIC.
    pub name: String,
    /// Include frames that do not concern the service.
    pub passing: bool,
}

/// A trace that has begun.
#[derive(Debug)]
pub(crate) struct StartedTrace {
    /// The source of events; dropping it ends the trace.
    pub watch: TraceSession,
    /// The target in words.
    pub who: String,
    /// What the trace does not show, in words.
    pub unseen: Option<String>,
    /// Why the guest gets no answers, if that is known.
    pub problem: Option<String>,
    /// The names of ports.
    pub ports: HashMap<PortKey, String>,
    /// Slots of other guests with the same MAC.
    pub others: Vec<Slot>,
}

/// Why there is no trace.
#[derive(Debug)]
pub(crate) struct TraceRefusal {
    /// The HTTP status of the answer.
    pub status: StatusCode,
    /// The text of the answer.
    pub text: String,
}

impl<'a> NodeView<'a> {
    /// Starts a trace of a port, of a MAC (on its port if it has one), or of the only NIC of a VM.
    ///
    /// # Errors
    /// [`TraceRefusal`]: the target is not known or not unique, or another trace runs.
    pub(crate) fn trace(self, target: &TraceTarget) -> Result<StartedTrace, TraceRefusal> {
        let TraceTarget { name, passing } = target;
        if let Ok(mac) = name.parse::<Mac>() {
            return self.trace_mac(mac, *passing);
        }
        match &self.ports_called(name)[..] {
            [port] => self.watched(Some(port), None, *passing, port_text(port), Some(NOT_BY_PORT.into())),
            [] => self.trace_vm(name, *passing),
            several => {
                let text = format!(
                    "{} ports are called {name}: {}; name one",
                    several.len(),
                    list(several, |port| port_text(port))
                );
                Err(TraceRefusal { status: StatusCode::CONFLICT, text })
            }
        }
    }

    fn trace_mac(self, mac: Mac, passing: bool) -> Result<StartedTrace, TraceRefusal> {
        let known: Vec<_> = self.ports.bindings().all().filter(|(who, _)| who.mac == mac).collect();
        let strange = self.ports.steering().attachments().unknown_senders();
        let strange = strange.into_iter().filter(|(_, sender)| sender.mac == mac);
        let strange: Vec<_> = strange.map(|(port, _)| port).collect();
        // Trace only the MAC's own port, even if another guest uses the MAC; all ports if its own is unknown.
        let port = match (&known[..], &strange[..]) {
            ([(IdentityName { port, .. }, _)], _) => Some(port),
            ([], [port]) => Some(*port),
            _ => None,
        };
        let unserved = self.unserved(&mac.to_string());
        let who = match (known.len(), &unserved[..]) {
            (0, [UnservedNic { id: Some(id), reason, .. }, ..]) => {
                format!("{mac} of {id}, which is not served: {reason}")
            }
            (0, _) => format!("{mac}, which no record has"),
            (1, _) => port.map_or_else(|| mac.to_string(), |port| format!("{mac} on {}", port_text(port))),
            (ports, _) => format!("{mac} on {ports} ports"),
        };
        self.watched(port, Some(mac), passing, who, None)
    }

    /// The attached ports of this name; without a namespace in the name, those of any namespace.
    fn ports_called(self, name: &str) -> Vec<&'a PortName> {
        let ports = || self.ports.steering().attachments().port_keys().map(|(_, port)| port);
        let called: Vec<_> = ports().filter(|port| port_text(port) == name).collect();
        if called.is_empty() { ports().filter(|port| port.ifname == name).collect() } else { called }
    }

    fn trace_vm(self, name: &str, passing: bool) -> Result<StartedTrace, TraceRefusal> {
        let nic = |who: &&IdentityName| format!("{} on {}", who.mac, port_text(&who.port));
        let (status, text) = match &self.identities_of_vm(name)[..] {
            [who] if self.ports.steering().attachments().is_attached(&who.port) => {
                let words = format!("{name}, {}", nic(who));
                return self.watched(Some(&who.port), Some(who.mac), passing, words, None);
            }
            [who] => {
                let reason = self.ports.state_of(&who.port).1.unwrap_or("no reason is known");
                (StatusCode::NOT_FOUND, format!("{name} is {}, which is not attached: {reason}", nic(who)))
            }
            [] if let [nic, ..] = &self.unserved(name)[..] => {
                let record = nic.id.map(|id| format!(" (record {id})")).unwrap_or_default();
                (StatusCode::NOT_FOUND, format!("{name}{record} is not served: {}", nic.reason))
            }
            [] => {
                let text = format!(
                    "no VM and no attached port is called {name}, and it is not a MAC; `xdp-imds ls` lists VMs, \
                     `xdp-imds status --all` ports"
                );
                (StatusCode::NOT_FOUND, text)
            }
            several => {
                let text = format!("{name} has {} NICs: {}; name a MAC", several.len(), list(several, nic));
                (StatusCode::CONFLICT, text)
            }
        };
        Err(TraceRefusal { status, text })
    }

    fn watched(
        self,
        port: Option<&PortName>,
        mac: Option<Mac>,
        passing: bool,
        who: String,
        unseen: Option<String>,
    ) -> Result<StartedTrace, TraceRefusal> {
        let watch = self.ports.steering().trace(port, mac, passing).map_err(|error| {
            let status = match error {
                TraceError::Busy => StatusCode::CONFLICT,
                TraceError::Steer(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            TraceRefusal { status, text: error.to_string() }
        })?;
        let ports = self
            .ports
            .steering()
            .attachments()
            .port_keys()
            .map(|(key, name)| (key, port_text(name)))
            .collect();
        let others = self.ports.bindings().all().filter(|(who, _)| {
            port.is_some_and(|port| who.port != *port) && mac.is_some_and(|mac| who.mac == mac)
        });
        let others = others.map(|(_, slot)| slot).collect();
        let problem = port.and_then(|port| self.mac_problem(port));
        Ok(StartedTrace { watch, who, unseen, problem, ports, others })
    }
}

/// The first [`LISTED`] of several names.
fn list<T>(several: &[T], name: impl Fn(&T) -> String) -> String {
    let mut names: Vec<_> = several.iter().take(LISTED).map(name).collect();
    if several.len() > LISTED {
        names.push("…".into());
    }
    names.join(", ")
}

//! Whom a trace is of.

use axum::http::StatusCode;
use metadata_common::mac::Mac;

use super::Node;
use super::status::spoken;
use crate::agent::endpoint::{TraceRefusal, TraceTarget, Traced};
use crate::agent::slots::IdentityName;
use metadata_base::port::PortName;
use metadata_steer::TraceError;

/// Ports named when a name means several, at most.
const PORTS_TOLD: usize = 4;
/// What a port's trace leaves out.
const NOT_BY_PORT: &str = "what the agent itself answers is seen only by MAC: its way back knows guests, not ports; trace the guest's MAC for that";

impl Node {
    /// Watches a MAC, on its port if it has one, or a port.
    pub(in crate::agent) fn trace(&self, target: &TraceTarget) -> Result<Traced, TraceRefusal> {
        match target.name.parse::<Mac>() {
            Ok(mac) => self.trace_mac(mac, target.passing),
            Err(_) => self.trace_port(&target.name, target.passing),
        }
    }

    fn trace_mac(&self, mac: Mac, passing: bool) -> Result<Traced, TraceRefusal> {
        let known: Vec<_> = self.bound.iter().filter(|(who, _)| who.mac == mac).collect();
        // Its port's and nobody else's, even if another guest uses its MAC; unless that is not known.
        let port = match &known[..] {
            [(IdentityName { port, .. }, _)] => Some(port),
            _ => None,
        };
        let who = match known.len() {
            0 => format!("{mac}, which no port has"),
            1 => port.map_or_else(|| mac.to_string(), |port| format!("{mac} on {}", spoken(port))),
            ports => format!("{mac} on {ports} ports"),
        };
        self.watched(port, Some(mac), passing, who, None)
    }

    fn trace_port(&self, name: &str, passing: bool) -> Result<Traced, TraceRefusal> {
        let ports = self.steering.port_keys().map(|(_, port)| port);
        let called: Vec<_> = ports.filter(|port| spoken(port) == name).collect();
        let named: Vec<_> = if called.is_empty() {
            self.steering.port_keys().map(|(_, port)| port).filter(|port| port.ifname == name).collect()
        } else {
            called
        };
        match &named[..] {
            [port] => self.watched(Some(port), None, passing, spoken(port), Some(NOT_BY_PORT.into())),
            [] => {
                let text = format!(
                    "no port {name} is attached, nor is it a MAC; `xdp-imds status --all` lists ports"
                );
                Err(TraceRefusal { status: StatusCode::NOT_FOUND, text })
            }
            several => {
                let names: Vec<_> = several.iter().take(PORTS_TOLD).map(|port| spoken(port)).collect();
                let text =
                    format!("{} ports are called {name}: {}, …; name one", several.len(), names.join(", "));
                Err(TraceRefusal { status: StatusCode::CONFLICT, text })
            }
        }
    }

    fn watched(
        &self,
        port: Option<&PortName>,
        mac: Option<Mac>,
        passing: bool,
        who: String,
        unseen: Option<String>,
    ) -> Result<Traced, TraceRefusal> {
        let watch = self.steering.watch(port, mac, passing).map_err(|error| {
            let status = match error {
                TraceError::Busy => StatusCode::CONFLICT,
                TraceError::Steer(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            TraceRefusal { status, text: error.to_string() }
        })?;
        let ports = self.steering.port_keys().map(|(key, name)| (key, spoken(name))).collect();
        let others = self.bound.iter().filter(|(who, _)| {
            port.is_some_and(|port| who.port != *port) && mac.is_some_and(|mac| who.mac == mac)
        });
        let others = others.map(|(_, bound)| bound.slot).collect();
        Ok(Traced { watch, who, unseen, ports, others })
    }
}

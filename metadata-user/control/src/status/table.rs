//! Prints the status as text.

use std::fmt::Display;
use std::io::{self, Write};

use metadata_common::printable::{Printable, counted, printable};
use metadata_content::record::values::Timestamp;

use crate::order::natural;

use super::{
    AgentStatus, FailedReads, GuestState, GuestStatus, GuestWay, IssuerState, OnDemandStatus, PendingEvent,
    PortState, RecordMemory, ShadowedRecord, Share, SharedUuid, SourceStatus, TenantShare,
};

/// Width of the left column, in characters.
const MARGIN: usize = 12;
/// Tenants that are named for each limit; the JSON has more.
const SHARES_NAMED: usize = 3;

/// Prints the state of an agent.
pub(super) fn status(status: &AgentStatus, out: &mut dyn Write) -> io::Result<()> {
    let state = if status.troubles.is_empty() { "healthy" } else { "degraded" };
    let AgentStatus { version, pid, uptime, phase, side, .. } = status;
    let (phase, up) = (phase.name(), Span(*uptime));
    let version = Printable(version);
    writeln!(out, "xdp-imds {version}: {state}, {phase}, up {up}, process {pid}, side {side}")?;
    list("problems", status.troubles.iter(), out)?;
    workers(status, out)?;
    ports(status, out)?;
    let instances: Vec<_> = status
        .instances
        .iter()
        .filter(|instances| instances.count > 0)
        .map(|instances| format!("{} {} ({})", instances.count, instances.state.name(), instances.source))
        .collect();
    let instances = if instances.is_empty() { "none".into() } else { instances.join(", ") };
    row("instances", &instances, out)?;
    let RecordMemory { used, limit } = status.record_memory;
    if limit > 0 {
        row("memory", &format!("records use {} of {} MiB", used.div_ceil(1 << 20), limit >> 20), out)?;
    }
    list("shares", status.shares.iter().filter_map(share), out)?;
    status.identity.as_ref().map_or(Ok(()), |issuer| identity(issuer, out))?;
    row("identities", &status.identities, out)?;
    if status.has_left {
        row("inherited", &"ports of the previous agent stay closed until a record names them", out)?;
    }
    // A sentence begins with the name of its record.
    let conflicts = in_order(&status.conflicts, |conflict| conflict.split(": ").next().unwrap_or_default());
    list("conflicts", conflicts.into_iter(), out)?;
    let refused = in_order(&status.refused, |refused| &refused.record).into_iter();
    list("refused", refused.map(|refused| format!("{}: {}", refused.record, refused.reason)), out)?;
    let shadowed = in_order(&status.shadowed, |shadowed| &shadowed.record).into_iter();
    list("shadowed", shadowed.map(|ShadowedRecord { record, by }| format!("{record}: by {by}")), out)?;
    let shared = status.shared_uuids.iter().map(|SharedUuid { uuid, records, unlisted }| {
        let more = if *unlisted > 0 { format!(" and {unlisted} more") } else { String::new() };
        let records: Vec<_> = in_order(records, |record| record).into_iter().map(String::as_str).collect();
        format!("{uuid}: {}{more}", records.join(", "))
    });
    list("shared UUID", shared, out)?;
    let more = status.pending_events.saturating_sub(status.events.len() as u64);
    let events = in_order(&status.events, |event| &event.vm).into_iter();
    let events = events.map(|PendingEvent { vm, event, .. }| format!("{vm}: {event}"));
    // With none of them listed, no record is in force for their VMs.
    let rest = if status.events.is_empty() {
        format!("{more} of VMs without a record")
    } else {
        format!("and {more} more")
    };
    list("events", events.chain((more > 0).then_some(rest)), out)?;
    for each in &status.sources {
        source(each, out)?;
    }
    let counters: Vec<_> = status.counters.iter().filter(|(_, count)| **count > 0).collect();
    let width = counters.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    list("counters", counters.iter().map(|(name, count)| format!("{name:width$}  {count}")), out)?;
    let lately = status.lately.iter().map(|said| {
        let times = if said.times > 1 { format!(" ({} times)", said.times) } else { String::new() };
        format!("{} ago, {}: {}{times}", Span(said.ago), said.level, said.text)
    });
    list("lately", lately, out)
}

/// Who holds most of a limit; nothing if the operator alone uses it, or if there is room for twice as much and nobody
/// was refused.
fn share(share: &Share) -> Option<String> {
    let Share { limit, used, most, refused, tenants } = share;
    let is_scarce = *refused > 0 || *used >= most.div_ceil(2);
    if !is_scarce || *refused == 0 && tenants.iter().all(|held| held.tenant == "operator") {
        return None;
    }
    let is_memory = limit == "record_memory" || limit.ends_with("_bytes");
    let amount =
        |held: &u64| if is_memory { format!("{} KiB", held.div_ceil(1 << 10)) } else { held.to_string() };
    let named = tenants.iter().take(SHARES_NAMED);
    let named = named.map(|TenantShare { tenant, held }| format!("{tenant} {}", amount(held)));
    let refused = if *refused > 0 { format!("; {refused} refused") } else { String::new() };
    let named = std::iter::once(format!("{limit}: {} of {}", amount(used), amount(most))).chain(named);
    Some(named.collect::<Vec<_>>().join(", ") + &refused)
}

fn workers(status: &AgentStatus, out: &mut dyn Write) -> io::Result<()> {
    let head = ["hub", "device", "heartbeat", "load", "guests", "connections", "requests"].map(String::from);
    let rows = status.workers.iter().map(|worker| {
        let heartbeat = worker.heartbeat.map_or("ended".into(), |age| format!("{age:.1} s"));
        let load = format!("{:.0} %", worker.load * 100.0);
        let numbers = [worker.guests, worker.connections, worker.requests].map(|number| number.to_string());
        let [guests, connections, requests] = numbers;
        [worker.hub.to_string(), worker.device.clone(), heartbeat, load, guests, connections, requests]
    });
    grid("workers", std::iter::once(head).chain(rows).collect(), out)
}

fn ports(status: &AgentStatus, out: &mut dyn Write) -> io::Result<()> {
    let of = |state| status.ports.counts.get(&state).copied().unwrap_or_default();
    let programs: Vec<_> =
        status.ports.programs.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let [attached, waiting, closed, error] = PortState::ALL.map(of);
    let programs = if programs.is_empty() { String::new() } else { format!(" ({})", programs.join(", ")) };
    let more = [(waiting, "waiting"), (error, "in error"), (closed, "closed without a record")];
    let more = more.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!(", {count} {what}"));
    row("ports", &format!("{attached} attached{programs}{}", more.collect::<String>()), out)?;
    // Closed ports come after those that have records.
    let mut listed = in_order(&status.ports.listed, |port| &port.name);
    listed.sort_by_key(|port| port.state == PortState::Closed);
    let rows = listed.into_iter().map(|port| {
        let why = port.reason.as_deref().or(port.program.as_deref()).unwrap_or_default();
        let way = if port.way == GuestWay::Inlet { ", inlet" } else { "" };
        [port.name.clone(), port.state.name().into(), format!("{why}{way}")]
    });
    grid("", rows.collect(), out)?;
    match status.ports.unlisted {
        0 => Ok(()),
        more => row("", &format!("and {more} more"), out),
    }
}

fn identity(
    IssuerState { issuer, algorithm, keys, signs, certificate_expires, ended, signed }: &IssuerState,
    out: &mut dyn Write,
) -> io::Result<()> {
    let signs = match signs {
        _ if *ended => "the signer has ended".to_owned(),
        Some(kid) => format!("{algorithm} by {kid}, {}", counted(*keys, "key")),
        None => "no key".to_owned(),
    };
    let tokens = format!("{issuer}: {signs}, {signed} tokens and documents signed");
    let documents = certificate_expires.map(|expires| {
        let time = Timestamp::at(i64::try_from(expires).unwrap_or(i64::MAX));
        format!(
            "signs documents by a certificate until {}",
            time.as_ref().map_or("a late time", Timestamp::as_str)
        )
    });
    list("issuer", std::iter::once(tokens).chain(documents), out)
}

fn source(status: &SourceStatus, out: &mut dyn Write) -> io::Result<()> {
    let SourceStatus { reads, answered, on_demand, failing, notes, .. } = status;
    let answered = match answered {
        Some(ago) => format!("{reads}, last read {} ago", Span(*ago)),
        None => format!("{reads}, not read yet"),
    };
    let on_demand = on_demand.as_ref().map(|OnDemandStatus { name, answered, .. }| match answered {
        Some(ago) => format!("{name}, last answered {} ago", Span(*ago)),
        None => format!("{name}, no answer yet"),
    });
    let failing = failing.as_ref().map(|FailedReads { since, kind, reason }| {
        let kind = if kind.is_empty() { String::new() } else { format!("{kind}: ") };
        format!("attempts have failed for {}: {kind}{reason}", Span(*since))
    });
    let lines = std::iter::once(answered).chain(on_demand).chain(notes.iter().cloned()).chain(failing);
    list(status.source.title(), lines, out)
}

/// Prints the state of the guests that match a name.
pub(super) fn guests(name: &str, guests: &[GuestStatus], out: &mut dyn Write) -> io::Result<()> {
    if guests.is_empty() {
        return writeln!(
            out,
            "no guest is known as {}: expected a port, a MAC, a VM's name or UUID, or a record's name or file; \
             `xdp-imds ls` lists records, `xdp-imds status --all` ports",
            Printable(name)
        );
    }
    for guest in in_order(guests, |guest| &guest.port) {
        let heading = match (guest.mac.as_str(), guest.port.as_str()) {
            ("", "") => guest.record.clone().unwrap_or_default(),
            ("", port) => port.to_owned(),
            (mac, "") => format!("{mac}, on no port"),
            (mac, port) => format!("{mac} on {port}"),
        };
        writeln!(out, "{}", Printable(heading))?;
        let state = match guest.state {
            GuestState::Served => "served",
            GuestState::Awaited => "its requests are held until its record comes",
            GuestState::Gone => "its record has gone: 404",
            GuestState::Unbound => "not served: its port is not attached",
            GuestState::Unreachable => "not served: its port takes no redirected frames",
            GuestState::Unserved => "not served",
        };
        row("state", &state, out)?;
        let vm = guest.vm.as_ref().zip(guest.uuid.as_ref()).map(|(vm, uuid)| format!("{vm}, {uuid}"));
        let held = guest.held.filter(|held| held.connections + held.requests > 0).map(|held| {
            let connections = counted(held.connections, "connection");
            format!("{connections}, {}", counted(held.requests, "waiting request"))
        });
        let number = |number: Option<u32>| number.map(|number| number.to_string());
        for (name, value) in [
            ("reason", guest.reason.clone()),
            ("problem", guest.problem.clone()),
            ("vm", vm),
            ("record", guest.record.clone()),
            ("steered by", guest.program.clone()),
            ("way", (guest.way == GuestWay::Inlet).then(|| "the inlet of its pod".into())),
            ("slot", number(guest.slot)),
            ("hub", number(guest.hub)),
            ("holds", held),
        ] {
            value.map_or(Ok(()), |value| row(name, &value, out))?;
        }
        list("events", guest.events.iter(), out)?;
    }
    Ok(())
}

/// The items in the order of their names for people. Those of one name stay in their order.
fn in_order<T>(items: &[T], name: impl Fn(&T) -> &str) -> Vec<&T> {
    let mut items: Vec<_> = items.iter().collect();
    items.sort_by(|one, other| natural(name(one), name(other)));
    items
}

fn row(name: &str, value: &dyn Display, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{name:MARGIN$}{}", Printable(value))
}

/// Prints lines below a name, and nothing if there are none.
fn list(name: &str, lines: impl Iterator<Item = impl Display>, out: &mut dyn Write) -> io::Result<()> {
    lines.enumerate().try_for_each(|(n, line)| row(if n == 0 { name } else { "" }, &line, out))
}

/// Prints columns as wide as their widest cell; the last one may exceed its width.
fn grid<const N: usize>(name: &str, rows: Vec<[String; N]>, out: &mut dyn Write) -> io::Result<()> {
    let rows: Vec<_> = rows.into_iter().map(|row| row.map(printable)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: [usize; N] = std::array::from_fn(width);
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    list(name, lines, out)
}

/// A duration for people.
struct Span(f64);

impl Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.max(0.0) as u64;
        let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
        match (days, hours, minutes) {
            (0, 0, 0) => write!(f, "{:.1} s", self.0),
            (0, 0, _) => write!(f, "{minutes} min {} s", seconds % 60),
            (0, _, _) => write!(f, "{hours} h {minutes} min"),
            _ => write!(f, "{days} d {hours} h"),
        }
    }
}

#[cfg(test)]
mod tests {
    use metadata_content::source::RecordSource;

    use super::{
        FailedReads, OnDemandStatus, PendingEvent, RecordMemory, Share, SharedUuid, SourceStatus, Span,
        TenantShare, guests, status,
    };
    use crate::status::{
        AgentStatus, AttachmentStatus, ExpectedMac, GuestState, GuestStatus, GuestUsage, GuestWay,
        InstanceState, Instances, IssuerState, MacMismatch, Phase, PortState, PortStatus, PortSummary,
        RecentWarning, RefusedRecord, ShadowedRecord, WorkerStatus,
    };
    use metadata_content::record::event::AnnouncedEvent;

    fn drain(acknowledged: Option<&str>) -> AnnouncedEvent {
        let event = serde_json::json!({
            "id": "drain-1", "kind": "freeze", "state": "scheduled", "not_before": "2030-01-01T00:00:00Z",
            "announced": "2029-12-31T23:55:00Z", "acknowledged": acknowledged,
        });
        serde_json::from_value(event).expect("an event")
    }

    fn some() -> AgentStatus {
        let worker = WorkerStatus {
            hub: 0,
            device: "imds-in0".into(),
            heartbeat: Some(0.25),
            load: 0.034,
            connections: 12,
            guests: 7,
            requests: 48_213,
        };
        let port = PortStatus {
            name: "tap7".into(),
            state: PortState::Error,
            reason: Some("another XDP program is on it".into()),
            program: None,
            way: GuestWay::Device,
            identities: 0,
        };
        AgentStatus {
            schema: crate::status::SCHEMA.into(),
            version: "0.1.0".into(),
            pid: 42,
            pins: None,
            records: None,
            uptime: 93_784.0,
            live: true,
            ready: true,
            phase: Phase::Serving,
            side: 1,
            from_snapshot: false,
            has_left: true,
            attachments: AttachmentStatus::default(),
            troubles: vec!["1 port in error".into()],
            workers: vec![worker.clone(), WorkerStatus { hub: 1, heartbeat: None, requests: 3, ..worker }],
            ports: PortSummary {
                counts: [(PortState::Attached, 9), (PortState::Error, 1)].into(),
                programs: [("tcx".into(), 2), ("xdp".into(), 7)].into(),
                listed: vec![port],
                unlisted: 2,
            },
            instances: vec![Instances { source: "file".into(), state: InstanceState::Served, count: 9 }],
            datasources: [("nocloud".into(), 9)].into(),
            identities: 9,
            conflicts: vec![],
            refused: vec![RefusedRecord { record: "web.yaml".into(), reason: "no vm".into() }],
            mac_mismatches: vec![],
            shared_uuids: vec![],
            missing_token_key: None,
            record_memory: RecordMemory { used: (5 << 20) + 1, limit: 512 << 20 },
            shares: vec![
                Share { limit: "ports".into(), used: 9, most: 16_384, ..Share::default() },
                Share {
                    limit: "events".into(),
                    used: 511,
                    most: 1_024,
                    tenants: vec![TenantShare { tenant: "namespace/shop".into(), held: 511 }],
                    ..Share::default()
                },
                Share {
                    limit: "record_memory".into(),
                    used: 1 << 20,
                    most: 2 << 20,
                    tenants: vec![TenantShare { tenant: "vm/123".into(), held: 1_025 }],
                    ..Share::default()
                },
                Share {
                    limit: "vmis".into(),
                    used: 7,
                    most: 4_096,
                    refused: 2,
                    tenants: [("namespace/shop", 5), ("namespace/bank", 2)]
                        .map(|(tenant, held)| TenantShare { tenant: tenant.into(), held })
                        .into(),
                },
            ],
            shadowed: vec![ShadowedRecord { record: "ns.yaml".into(), by: "api/ns".into() }],
            sources: vec![
                SourceStatus {
                    source: RecordSource::Kubevirt,
                    reads: "the API server".into(),
                    asked_for: 93_783.0,
                    answered: Some(310.0),
                    failing: Some(FailedReads {
                        since: 189.0,
                        kind: "forbidden".into(),
                        reason: "403 no".into(),
                    }),
                    failures: [("forbidden".into(), 12)].into(),
                    ..SourceStatus::default()
                },
                SourceStatus {
                    source: RecordSource::Proxmox,
                    reads: "/etc/pve/qemu-server".into(),
                    asked_for: 93_783.0,
                    answered: Some(62.0),
                    failing: Some(FailedReads { since: 61.0, kind: String::new(), reason: "no".into() }),
                    notes: vec!["read-only: the cluster has no quorum".into()],
                    ..SourceStatus::default()
                },
                SourceStatus {
                    source: RecordSource::Openstack,
                    reads: "unix:/run/ovs.sock and ssl:10.0.0.1:6642".into(),
                    answered: Some(0.0),
                    on_demand: Some(OnDemandStatus {
                        name: "Nova at http://10.0.0.10:8775".into(),
                        answered: Some(12.0),
                        away: 0.0,
                    }),
                    ..SourceStatus::default()
                },
            ],
            identity: Some(IssuerState {
                issuer: "https://imds.example".into(),
                algorithm: "ES256".into(),
                keys: 2,
                signs: Some("kid".into()),
                certificate_expires: Some(1_798_761_600),
                ended: false,
                signed: 7,
            }),
            pending_events: 3,
            events: vec![PendingEvent {
                record: "file/web.yaml".into(),
                vm: "web".into(),
                event: drain(Some("2029-12-31T23:56:00Z")),
            }],
            counters: [("identity_mismatch".into(), 3), ("over_limit".into(), 0)].into(),
            lately: vec![RecentWarning {
                level: "warn".into(),
                ago: 61.0,
                times: 2,
                text: "port tap7: no".into(),
            }],
        }
    }

    #[test]
    fn an_agent_is_shown_in_aligned_columns() {
        let mut out = Vec::new();
        status(&some(), &mut out).expect("written");
        let expected = "\
xdp-imds 0.1.0: degraded, serving, up 1 d 2 h, process 42, side 1
problems    1 port in error
workers     hub  device    heartbeat  load  guests  connections  requests
            0    imds-in0  0.2 s      3 %   7       12           48213
            1    imds-in0  ended      3 %   7       12           3
ports       9 attached (2 tcx, 7 xdp), 1 in error
            tap7  error  another XDP program is on it
            and 2 more
instances   9 served (file)
memory      records use 6 of 512 MiB
shares      record_memory: 1024 KiB of 2048 KiB, vm/123 2 KiB
            vmis: 7 of 4096, namespace/shop 5, namespace/bank 2; 2 refused
issuer      https://imds.example: ES256 by kid, 2 keys, 7 tokens and documents signed
            signs documents by a certificate until 2027-01-01T00:00:00Z
identities  9
inherited   ports of the previous agent stay closed until a record names them
refused     web.yaml: no vm
shadowed    ns.yaml: by api/ns
events      web: drain-1: freeze, scheduled for 2030-01-01T00:00:00Z, acknowledged
            and 2 more
KubeVirt    the API server, last read 5 min 10 s ago
            attempts have failed for 3 min 9 s: forbidden: 403 no
Proxmox VE  /etc/pve/qemu-server, last read 1 min 2 s ago
            read-only: the cluster has no quorum
            attempts have failed for 1 min 1 s: no
OpenStack   unix:/run/ovs.sock and ssl:10.0.0.1:6642, last read 0.0 s ago
            Nova at http://10.0.0.10:8775, last answered 12.0 s ago
counters    identity_mismatch  3
lately      1 min 1 s ago, warn: port tap7: no (2 times)
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn the_json_is_read_back_as_it_was_written() {
        let text = serde_json::to_string(&some()).expect("JSON");
        assert_eq!(serde_json::from_str::<AgentStatus>(&text).expect("a status"), some());
        assert!(text.contains(r#""counts":{"attached":9,"error":1}"#), "{text}");
    }

    fn a_guest() -> GuestStatus {
        GuestStatus {
            port: "tap0".into(),
            mac: "52:54:00:00:00:01".into(),
            record: Some("web.yaml".into()),
            vm: Some("web".into()),
            uuid: Some("7c0f".into()),
            owner: Some("7c0f".into()),
            state: GuestState::Served,
            reason: None,
            problem: Some("another MAC".into()),
            slot: Some(4),
            hub: Some(0),
            program: Some("xdp".into()),
            way: GuestWay::Inlet,
            held: Some(GuestUsage { connections: 2, requests: 1 }),
            events: vec![drain(None)],
        }
    }

    #[test]
    fn a_guest_is_shown_with_what_is_known_of_it() {
        let mut out = Vec::new();
        guests("web", &[a_guest()], &mut out).expect("written");
        let expected = "\
52:54:00:00:00:01 on tap0
state       served
problem     another MAC
vm          web, 7c0f
record      web.yaml
steered by  xdp
way         the inlet of its pod
slot        4
hub         0
holds       2 connections, 1 waiting request
events      drain-1: freeze, scheduled for 2030-01-01T00:00:00Z
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn a_mac_that_no_record_has_is_said_with_what_its_port_expects() {
        let expected =
            |mac: &str, record: Option<&str>| ExpectedMac { mac: mac.into(), record: record.map(Into::into) };
        let web = expected("52:54:00:00:00:99", Some("web-1.yaml"));
        let many = (0..9).map(|n| expected(&format!("52:54:00:00:00:0{n}"), None)).collect();
        for (expected, ago, text) in [
            (
                vec![web.clone()],
                None,
                "because web-1.yaml expects 52:54:00:00:00:99 there; give the NIC the MAC",
            ),
            (vec![web], Some(40.4), "52:54:00:00:00:99 there (last noticed 40 s ago); give the NIC"),
            (
                vec![expected("52:54:00:00:00:01", None)],
                Some(0.3),
                "the configuration expects 52:54:00:00:00:01 there; give",
            ),
            (vec![], Some(599.9), "no record has a NIC on this port (last noticed 600 s ago); register"),
            (many, None, "the configuration expects 52:54:00:00:00:03, … there"),
        ] {
            let said = MacMismatch { port: "vnet0".into(), mac: "52:54:00:00:00:56".into(), expected, ago };
            let said = said.to_string();
            assert!(said.starts_with("vnet0: frames from MAC 52:54:00:00:00:56 are dropped"), "{said}");
            assert!(said.contains(text), "{said}");
        }
    }

    #[test]
    fn names_are_listed_in_the_order_for_people() {
        let names = ["vx10", "vx2", "vx1"];
        let port =
            |name: &str, state| PortStatus { name: name.into(), state, ..some().ports.listed[0].clone() };
        let waiting = names.map(|name| port(name, PortState::Waiting));
        let listed = [port("vx0", PortState::Closed)].into_iter().chain(waiting).collect();
        let of = |name: &str| format!("{name}.yaml");
        let many = AgentStatus {
            ports: PortSummary { listed, ..PortSummary::default() },
            conflicts: names.map(|name| format!("{}: it is taken", of(name))).into(),
            refused: names.map(|name| RefusedRecord { record: of(name), reason: "no vm".into() }).into(),
            shadowed: names.map(|name| ShadowedRecord { record: of(name), by: format!("api/{name}") }).into(),
            shared_uuids: vec![SharedUuid { records: names.map(of).into(), ..SharedUuid::default() }],
            events: names.map(|vm| PendingEvent { vm: vm.into(), ..some().events[0].clone() }).into(),
            ..AgentStatus::default()
        };
        let mut out = Vec::new();
        status(&many, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        for (what, expected) in [
            ("ports", &["vx1  ", "vx2  ", "vx10 ", "vx0  "][..]),
            ("conflicts", &["vx1.yaml: it", "vx2.yaml: it", "vx10.yaml: it"]),
            ("refused", &["vx1.yaml: no vm", "vx2.yaml: no vm", "vx10.yaml: no vm"]),
            ("shadowed", &["vx1.yaml: by", "vx2.yaml: by", "vx10.yaml: by"]),
            ("shared UUID", &["vx1.yaml, vx2.yaml, vx10.yaml"]),
            ("events", &["vx1: ", "vx2: ", "vx10: "]),
        ] {
            let begins: Vec<_> = expected.iter().map(|name| text.find(name).expect("it is listed")).collect();
            assert!(begins.is_sorted(), "{what}: {text}");
        }
        let guest = |port: &str| GuestStatus { port: port.into(), ..a_guest() };
        let mut out = Vec::new();
        guests("web", &names.map(guest), &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        let begins = ["on vx1\n", "on vx2\n", "on vx10\n"].map(|name| text.find(name).expect("it is listed"));
        assert!(begins.is_sorted(), "{text}");
    }

    #[test]
    fn events_of_vms_without_a_record_are_counted() {
        let mut out = Vec::new();
        status(&AgentStatus { pending_events: 2, events: vec![], ..some() }, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("\nevents      2 of VMs without a record\n"), "{text}");
    }

    #[test]
    fn durations_are_printed_for_people() {
        let cases = [
            (0.26, "0.3 s"),
            (59.0, "59.0 s"),
            (61.0, "1 min 1 s"),
            (7_260.0, "2 h 1 min"),
            (90_000.0, "1 d 1 h"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(Span(seconds).to_string(), expected);
        }
    }
}

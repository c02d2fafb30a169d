//! The node: the build, the kernel's verdicts, ports, records, and what is done beside answering.

use metadata_common::verdict::Verdict;

use super::exposition::{Exposition, Kind, Seconds};
use super::{Attaching, Errands, LAG_BOUNDS, Reloads, Snapshot};
use metadata_control::status::ApiServer;
use metadata_feed::room::Usage;

const NONE: [(&str, &str); 0] = [];

/// Which program this is.
pub(super) fn build(out: &mut Exposition) {
    let labels = [("version", env!("CARGO_PKG_VERSION")), ("arch", std::env::consts::ARCH)];
    out.family("xdp_imds_build_info", "Which agent this is; always 1.", Kind::Gauge, [(labels, 1)]);
}

/// What the kernel side decided on frames.
pub(super) fn frames(verdicts: &[(&str, u64)], out: &mut Exposition) {
    let each = verdicts.iter().map(|(name, count)| ([("verdict", *name)], *count));
    let (name, help) = ("xdp_imds_frames_total", "Frames on owned ports and hubs, by verdict.");
    out.family(name, help, Kind::Counter, each);
    let mismatches = verdicts.iter().filter(|(name, _)| *name == Verdict::DropUnknownMac.name());
    out.family(
        "xdp_imds_identity_mismatch_total",
        "Frames dropped because their MAC is not one of their port's.",
        Kind::Counter,
        mismatches.map(|(_, count)| (NONE, *count)),
    );
}

/// The ports.
pub(super) fn ports<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    out.family("xdp_imds_ports", "Ports attached.", Kind::Gauge, [(NONE, snapshot.ports)]);
    let steered = snapshot.steered_by.map(|(program, ports)| ([("program", program)], ports));
    out.family("xdp_imds_ports_steered", "Ports by the program that steers them.", Kind::Gauge, steered);
    let taps = snapshot.taps.iter().map(|(state, count)| ([("state", state.name())], *count));
    let help = "Ports that records and configuration ask for, by what has become of them.";
    out.family("xdp_imds_taps", help, Kind::Gauge, taps);
    let (name, help) = (
        "xdp_imds_port_refused_frames_total",
        "Frames that devices of ports did not take, the agent's and all others: their guest does not empty its ring.",
    );
    out.family(name, help, Kind::Counter, [(NONE, snapshot.refused_by_ports)]);
    out.family("xdp_imds_identities", "Identities bound.", Kind::Gauge, [(NONE, snapshot.identities)]);
    attaching(&snapshot.attaching, out);
}

fn attaching(Attaching { count, total, median, lag }: &Attaching, out: &mut Exposition) {
    let (name, help) = ("xdp_imds_attached_total", "Ports attached since the start.");
    out.family(name, help, Kind::Counter, [(NONE, *count)]);
    let (name, help) =
        ("xdp_imds_attach_seconds_total", "Time it took to attach them and bind their guests.");
    out.family(name, help, Kind::Counter, [(NONE, Seconds(*total))]);
    let (name, help) = ("xdp_imds_attach_seconds_median", "The median of the last 4096 of them.");
    out.family(name, help, Kind::Gauge, [(NONE, Seconds(*median))]);
    let help = "Time from the first sight of a tap that is asked for until its guest was bound.";
    out.histogram("xdp_imds_registration_lag_seconds", help, &LAG_BOUNDS, &lag.buckets, lag.total);
}

/// Records and configuration.
pub(super) fn records<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    let rendering = [(NONE, Seconds(snapshot.rendering))];
    out.family("xdp_imds_render_seconds_total", "Time spent on rendering records.", Kind::Counter, rendering);
    out.family("xdp_imds_records", "Records held.", Kind::Gauge, [(NONE, snapshot.records)]);
    let instances = snapshot.instances.iter().map(|instances| {
        ([("source", instances.source.as_str()), ("state", instances.state.name())], instances.count)
    });
    let help = "Records held, by where they came from and what has become of them.";
    out.family("xdp_imds_instances", help, Kind::Gauge, instances);
    out.family(
        "xdp_imds_records_source",
        "1 for where records come from: their source, or the snapshot while that is away.",
        Kind::Gauge,
        [("source", !snapshot.from_snapshot), ("snapshot", snapshot.from_snapshot)]
            .map(|(name, is)| ([("source", name)], u64::from(is))),
    );
    out.family(
        "xdp_imds_records_rejected_total",
        "Records refused; the last good one stays.",
        Kind::Counter,
        [(NONE, snapshot.records_rejected)],
    );
    let Usage { limit, used, refusals } = snapshot.room;
    let help = "Memory that records take, by an upper estimate.";
    out.family("xdp_imds_record_memory_bytes", help, Kind::Gauge, [(NONE, used as u64)]);
    let help = "Memory that records may take; those beyond are refused.";
    out.family("xdp_imds_record_memory_limit_bytes", help, Kind::Gauge, [(NONE, limit as u64)]);
    let help = "Records for which there was no memory; the last good one stays.";
    out.family("xdp_imds_record_memory_refused_total", help, Kind::Counter, [(NONE, refusals)]);
    let Reloads { done, failed } = snapshot.config_reloads;
    out.family(
        "xdp_imds_config_reloads_total",
        "Times the configuration was read again; one that failed changed nothing.",
        Kind::Counter,
        [([("outcome", "done")], done), ([("outcome", "failed")], failed)],
    );
}

/// The API server of the cluster.
pub(super) fn api_server(server: &ApiServer, out: &mut Exposition) {
    out.family(
        "xdp_imds_api_server_silence_seconds",
        "Time since the API server's last useful answer, or since the agent began to ask; at most 150 when all is well.",
        Kind::Gauge,
        [(NONE, server.silence())],
    );
    out.family(
        "xdp_imds_api_server_failing",
        "1 while requests to the API server fail.",
        Kind::Gauge,
        [(NONE, u64::from(server.failing.is_some()))],
    );
    let failures = server.failures.iter().map(|(kind, count)| ([("kind", kind.as_str())], *count));
    let help =
        "Requests to the API server that failed, by kind; gone: its history, and all VMIs are listed anew.";
    out.family("xdp_imds_api_server_failures_total", help, Kind::Counter, failures);
}

/// What is done for guests beside answering them.
pub(super) fn errands(Errands { messages, mailboxes }: &Errands, out: &mut Exposition) {
    out.family(
        "xdp_imds_messages_total",
        "Messages from guests to sinks, by what became of them.",
        Kind::Counter,
        [("delivered", messages.delivered), ("failed", messages.failed), ("dropped", messages.dropped)]
            .map(|(outcome, count)| ([("outcome", outcome)], count)),
    );
    let waiting = [(NONE, messages.waiting)];
    out.family("xdp_imds_messages_waiting", "Messages on their way to sinks.", Kind::Gauge, waiting);
    out.family(
        "xdp_imds_waits_ended_total",
        "Requests waiting for a change that were ended for a newer one of the same VM.",
        Kind::Counter,
        [(NONE, messages.waits_ended)],
    );
    out.family(
        "xdp_imds_state_errors_total",
        "Files of the state directory that could not be read or written.",
        Kind::Counter,
        [("load", mailboxes.loads_failed), ("save", mailboxes.saves_failed)]
            .map(|(operation, count)| ([("operation", operation)], count)),
    );
}

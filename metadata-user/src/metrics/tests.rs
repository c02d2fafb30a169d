use metadata_common::share::{ShareReport, Tenant};
use metadata_content::identity::IdentityCounts;
use metadata_content::sink::SinkCounts;
use metadata_control::status::{InstanceState, Instances, PortState, SourceStatus};
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::{LinkStats, TapStats};
use metadata_datapath::worker::{LoopStats, WorkerStats};
use metadata_feed::memory_budget::Usage;
use metadata_feed::state::mailboxes::MailboxCounts;
use metadata_steer::{AttachmentCheck, AttachmentFault, HubLosses};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::{
    AttachHistogram, BackgroundCounters, BindHistogram, Exposition, HubMetrics, MetricType, ProcessMetrics,
    Reloads, Snapshot, render,
};
use crate::identity::SignerReport;
use crate::service::audit::AuditCounts;
use crate::service::{DocumentCounts, WorkerCounts};

fn worker() -> WorkerStats<()> {
    WorkerStats {
        turns: LoopStats {
            turns: 1,
            full_batches: 2,
            sleeps: 3,
            naps: 4,
            slept: Duration::from_micros(1_500_004),
            elapsed: Duration::from_secs(5),
            forgotten: 6,
            woken: 7,
        },
        socket: SocketStats {
            frames: 11,
            bytes: 12,
            bad_descriptors: 13,
            dropped: 14,
            ring_full: 15,
            fill_ring_empty: 16,
            invalid_fill: 17,
        },
        link: LinkStats { runt: 21, unstamped: 22, slot_out_of_range: 23, over_share: 24 },
        tap: TapStats {
            frames: 31,
            bytes: 32,
            long: 30,
            bad_length: 33,
            full: 34,
            no_memory: 35,
            down: 36,
            other: 37,
        },
        engine: (),
    }
}

const LOSSES: HubLosses = HubLosses { veth_full: 91, tap_dropped: 92 };

fn text() -> String {
    let hub =
        |number, counters, gauges| HubMetrics { number, losses: LOSSES, worker: worker(), counters, gauges };
    let hubs =
        [hub(0, &[("segments", 41)][..], &[("connections", 42)][..]), hub(1, &[("segments", 43)], &[])];
    let verdicts = [("steered", 51), ("drop_unknown_mac", 52)];
    let mut lag = BindHistogram::default();
    for millis in [1, 30, 99_000] {
        lag.waited(Duration::from_millis(millis));
    }
    render(&Snapshot {
        is_ready: true,
        problems: 49,
        verdicts: &verdicts,
        ports: 61,
        steered_by: [("xdp", 21), ("tcx", 40)],
        identities: 62,
        records: 63,
        taps: &[(PortState::Attached, 60), (PortState::Error, 1)],
        instances: &[Instances { source: "file".into(), state: InstanceState::Served, count: 67 }],
        tallies: &[Arc::new(WorkerCounts::default())],
        documents: Some(DocumentCounts {
            learned: 101,
            vms: 102,
            documents: 103,
            responses: 104,
            displaced: 105,
        }),
        audit: Some(AuditCounts { written: 81, sampled: 82, queue_full: 83, write_failed: 84 }),
        process: ProcessMetrics::read(),
        attaching: AttachHistogram { lag, ..AttachHistogram::default() },
        rendering: Duration::ZERO,
        records_rejected: 64,
        room: Usage { limit: 1 << 30, used: 1 << 20, refusals: 3 },
        shares: &[ShareReport {
            limit: "vmis",
            used: 9,
            most: 97,
            refusals: 98,
            top: vec![(Tenant::namespace("shop"), 99)],
        }],
        from_snapshot: true,
        sources: &[SourceStatus {
            source: metadata_content::source::RecordSource::Kubevirt,
            reads: "the API server".into(),
            asked_for: 900.0,
            answered: Some(301.5),
            failures: [("forbidden".into(), 94), ("gone".into(), 95)].into(),
            ..SourceStatus::default()
        }],
        identity: Some((
            SignerReport {
                issuer: "https://imds.example".into(),
                algorithm: "ES256",
                keys: 85,
                signs: Some("kid".into()),
                certificate_expires: Some(96),
                ended: false,
            },
            IdentityCounts { signed: 86, reused: 87, limited: 88, crowded: 89, failed: 90, waiting: 91 },
        )),
        config_reloads: Reloads { done: 65, failed: 66 },
        errands: BackgroundCounters {
            messages: SinkCounts { delivered: 71, failed: 72, dropped: 73, waiting: 74, waits_ended: 75 },
            mailboxes: MailboxCounts { saves_failed: 76, loads_failed: 77, pending_events: 0 },
            unsaved: 97,
        },
        refused_by_ports: 93,
        attachments: &AttachmentCheck {
            checked: Some(Duration::from_millis(97_500)),
            faults: vec!["one".into(), "another".into()],
            found: [(AttachmentFault::Detached, 98)].into(),
            retired: 99,
        },
        slots_retired: 100,
        hubs: &hubs,
    })
}

#[test]
fn every_counter_and_gauge_has_a_line() {
    let text = text();
    for line in [
        "xdp_imds_frames_total{verdict=\"steered\"} 51",
        "xdp_imds_frames_total{verdict=\"drop_unknown_mac\"} 52",
        "xdp_imds_identity_mismatch_total 52",
        "xdp_imds_taps{state=\"attached\"} 60",
        "xdp_imds_taps{state=\"error\"} 1",
        "xdp_imds_instances{source=\"file\",state=\"served\"} 67",
        "xdp_imds_registration_lag_seconds_bucket{le=\"0.001\"} 1",
        "xdp_imds_registration_lag_seconds_bucket{le=\"0.1\"} 2",
        "xdp_imds_registration_lag_seconds_bucket{le=\"10\"} 2",
        "xdp_imds_registration_lag_seconds_bucket{le=\"+Inf\"} 3",
        "xdp_imds_registration_lag_seconds_count 3",
        "xdp_imds_registration_lag_seconds_sum 99.031000000",
        "xdp_imds_state_unsaved_files 97",
        "xdp_imds_audit_lines_total 81",
        "xdp_imds_audit_dropped_total{reason=\"sampled\"} 82",
        "xdp_imds_audit_dropped_total{reason=\"queue_full\"} 83",
        "xdp_imds_audit_dropped_total{reason=\"write_failed\"} 84",
        "xdp_imds_request_duration_seconds_bucket{le=\"0.00005\"} 0",
        "xdp_imds_ports 61",
        "xdp_imds_ports_steered{program=\"xdp\"} 21",
        "xdp_imds_ports_steered{program=\"tcx\"} 40",
        "xdp_imds_identities 62",
        "xdp_imds_source_silence_seconds{source=\"kubevirt\"} 301.5",
        "xdp_imds_source_failing{source=\"kubevirt\"} 0",
        "xdp_imds_source_failures_total{source=\"kubevirt\",kind=\"forbidden\"} 94",
        "xdp_imds_source_failures_total{source=\"kubevirt\",kind=\"gone\"} 95",
        "xdp_imds_identity_tokens_total{outcome=\"signed\"} 86",
        "xdp_imds_identity_tokens_total{outcome=\"crowded\"} 89",
        "xdp_imds_identity_tokens_waiting 91",
        "xdp_imds_identity_keys 85",
        "xdp_imds_identity_certificate_expiration_timestamp_seconds 96",
        "xdp_imds_ready 1",
        "xdp_imds_problems 49",
        "xdp_imds_identity_signer_up 1",
        "xdp_imds_messages_total{outcome=\"delivered\"} 71",
        "xdp_imds_messages_total{outcome=\"failed\"} 72",
        "xdp_imds_messages_total{outcome=\"dropped\"} 73",
        "xdp_imds_messages_waiting 74",
        "xdp_imds_waits_ended_total 75",
        "xdp_imds_attachment_faults_total{fault=\"detached\"} 98",
        "xdp_imds_attachment_faults 2",
        "xdp_imds_attachments_checked_seconds 97.500000000",
        "xdp_imds_numbers_retired{kind=\"namespace\"} 99",
        "xdp_imds_numbers_retired{kind=\"slot\"} 100",
        "xdp_imds_state_errors_total{operation=\"save\"} 76",
        "xdp_imds_state_errors_total{operation=\"load\"} 77",
        "xdp_imds_worker_turns_total{hub=\"0\"} 1",
        "xdp_imds_worker_full_batches_total{hub=\"0\"} 2",
        "xdp_imds_worker_sleeps_total{hub=\"0\"} 3",
        "xdp_imds_worker_naps_total{hub=\"0\"} 4",
        "xdp_imds_worker_slept_seconds_total{hub=\"0\"} 1.500004000",
        "xdp_imds_worker_seconds_total{hub=\"0\"} 5.000000000",
        "xdp_imds_worker_forgotten_total{hub=\"0\"} 6",
        "xdp_imds_worker_woken_total{hub=\"0\"} 7",
        "xdp_imds_received_frames_total{hub=\"0\"} 11",
        "xdp_imds_received_bytes_total{hub=\"0\"} 12",
        "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"bad_descriptor\"} 13",
        "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"dropped\"} 14",
        "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"ring_full\"} 15",
        "xdp_imds_fill_ring_empty_total{hub=\"0\"} 16",
        "xdp_imds_receive_lost_frames_total{hub=\"1\",reason=\"veth_full\"} 91",
        "xdp_imds_hub_dropped_frames_total{hub=\"0\"} 92",
        "xdp_imds_share_limit{limit=\"vmis\"} 97",
        "xdp_imds_share_refused_total{limit=\"vmis\"} 98",
        "xdp_imds_share_held{limit=\"vmis\",tenant=\"namespace/shop\"} 99",
        "xdp_imds_port_refused_frames_total 93",
        "xdp_imds_fill_ring_invalid_total{hub=\"0\"} 17",
        "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"runt\"} 21",
        "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"unstamped\"} 22",
        "xdp_imds_receive_lost_frames_total{hub=\"1\",reason=\"slot_out_of_range\"} 23",
        "xdp_imds_receive_lost_frames_total{hub=\"1\",reason=\"over_share\"} 24",
        "xdp_imds_sent_frames_total{hub=\"0\"} 31",
        "xdp_imds_sent_bytes_total{hub=\"0\"} 32",
        "xdp_imds_sent_long_frames_total{hub=\"0\"} 30",
        "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"bad_length\"} 33",
        "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"full\"} 34",
        "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"no_memory\"} 35",
        "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"down\"} 36",
        "xdp_imds_send_lost_frames_total{hub=\"1\",reason=\"other\"} 37",
        "xdp_imds_stack_segments_total{hub=\"0\"} 41",
        "xdp_imds_stack_connections{hub=\"0\"} 42",
        "xdp_imds_stack_segments_total{hub=\"1\"} 43",
    ] {
        assert!(text.lines().any(|other| other == line), "no `{line}` in\n{text}");
    }
}

#[test]
fn every_family_has_one_head_before_its_samples_and_counters_end_in_total() {
    let (mut heads, mut current) = (HashSet::new(), String::new());
    for line in text().lines() {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["#", "HELP", name, ..] => {
                assert!(heads.insert(name.to_owned()), "{name} twice");
                current = name.to_owned();
            }
            ["#", "TYPE", name, kind] => {
                assert_eq!(name, current);
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            }
            [sample, value] => {
                let name = sample.split('{').next().expect("a name");
                let suffixes = ["", "_bucket", "_sum", "_count"];
                assert!(suffixes.iter().any(|suffix| name == format!("{current}{suffix}")), "{line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
            _ => panic!("{line}"),
        }
    }
    assert!(heads.len() > 40, "{}", heads.len());
}

#[test]
fn help_texts_and_label_values_are_escaped() {
    let mut out = Exposition::default();
    out.family("x", "a\\b\n\"c\"", MetricType::Gauge, [([("l", "a\\b\n\"c\"")], 1)]);
    let expected = "# HELP x a\\\\b\\n\"c\"\n# TYPE x gauge\nx{l=\"a\\\\b\\n\\\"c\\\"\"} 1\n";
    assert_eq!(out.into_text(), expected);
}

#[test]
fn a_family_without_samples_is_left_out() {
    let text = render::<()>(&Snapshot {
        is_ready: false,
        problems: 0,
        verdicts: &[],
        ports: 0,
        steered_by: [("xdp", 0), ("tcx", 0)],
        identities: 0,
        records: 0,
        records_rejected: 0,
        room: Usage::default(),
        shares: &[],
        sources: &[],
        identity: None,
        from_snapshot: false,
        config_reloads: Reloads::default(),
        taps: &[],
        instances: &[],
        tallies: &[],
        documents: None,
        audit: None,
        process: None,
        attaching: AttachHistogram::default(),
        rendering: Duration::ZERO,
        errands: BackgroundCounters::default(),
        refused_by_ports: 0,
        attachments: &AttachmentCheck::default(),
        slots_retired: 0,
        hubs: &[],
    });
    assert!(text.starts_with("# HELP xdp_imds_build_info "), "{text}");
    assert!(!text.contains("audit") && !text.contains("requests_total"), "{text}");
    assert!(!text.contains("xdp_imds_frames_total") && !text.contains("{hub="), "{text}");
}

#[test]
fn the_process_figures_are_plausible_and_grow() {
    let process = ProcessMetrics::read().expect("/proc is there");
    assert!(process.resident > 1 << 20 && process.virtual_size > process.resident, "{process:?}");
    assert!(process.threads >= 1 && process.descriptors >= 3, "{process:?}");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    assert!(process.started < now && now - process.started < Duration::from_secs(86_400), "{process:?}");
    let more: Vec<_> = (0..16).map(|_| std::fs::File::open("/dev/null").expect("a descriptor")).collect();
    let then = ProcessMetrics::read().expect("/proc is there");
    assert!(then.descriptors >= more.len() as u64, "{then:?}");
    assert!(then.cpu >= process.cpu, "{then:?}");
}

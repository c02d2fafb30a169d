//! Metrics of each hub: frames, turns of its worker, and the TCP stack's own counters.

use std::time::Duration;

use super::HubMetrics;
use super::exposition::{Exposition, MetricType, Seconds};
use metadata_datapath::worker::WorkerStats;

/// The hubs of a snapshot, with their numbers as text.
pub(super) struct Hubs<'a, T> {
    pub(super) hubs: &'a [HubMetrics<'a, T>],
    pub(super) numbers: &'a [String],
}

impl<'a, T> Hubs<'a, T> {
    fn each(&self) -> impl Iterator<Item = (&'a str, &'a HubMetrics<'a, T>)> {
        self.numbers.iter().map(String::as_str).zip(self.hubs)
    }

    /// Adds a family with one value per hub.
    fn one(&self, out: &mut Exposition, name: &str, help: &str, of: fn(&WorkerStats<T>) -> u64) {
        let samples = self.each().map(|(number, hub)| ([("hub", number)], of(&hub.worker)));
        out.family(name, help, MetricType::Counter, samples);
    }

    /// Adds a family of lost frames, with one value per hub and reason.
    fn lost<const N: usize>(
        &self,
        out: &mut Exposition,
        name: &str,
        help: &str,
        of: fn(&HubMetrics<'_, T>) -> [(&'static str, u64); N],
    ) {
        let samples = self.each().flat_map(|(number, hub)| {
            of(hub).map(|(reason, count)| ([("hub", number), ("reason", reason)], count))
        });
        out.family(name, help, MetricType::Counter, samples);
    }

    pub(super) fn received(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_received_frames_total", "Frames that the AF_XDP socket received.", |w| {
            w.socket.frames
        });
        self.one(
            out,
            "xdp_imds_received_bytes_total",
            "Bytes of the frames that the AF_XDP socket received.",
            |w| w.socket.bytes,
        );
        let help = "Received frames that were lost, by reason; over_share: frames of VMs that exceed their share of a worker's time.";
        self.lost(out, "xdp_imds_receive_lost_frames_total", help, |hub| {
            let w = &hub.worker;
            [
                ("veth_full", hub.losses.veth_full),
                ("ring_full", w.socket.ring_full),
                ("dropped", w.socket.dropped),
                ("bad_descriptor", w.socket.bad_descriptors),
                ("runt", w.link.runt),
                ("unstamped", w.link.unstamped),
                ("slot_out_of_range", w.link.slot_out_of_range),
                ("over_share", w.link.over_share),
            ]
        });
        let help = "Times the kernel found the fill ring empty.";
        self.one(out, "xdp_imds_fill_ring_empty_total", help, |w| w.socket.fill_ring_empty);
        let help = "Addresses in the fill ring that the kernel refused.";
        self.one(out, "xdp_imds_fill_ring_invalid_total", help, |w| w.socket.invalid_fill);
    }

    pub(super) fn sent(&self, out: &mut Exposition) {
        self.one(
            out,
            "xdp_imds_sent_frames_total",
            "Frames that the hub's taps accepted, long ones included.",
            |w| w.tap.frames,
        );
        self.one(
            out,
            "xdp_imds_sent_bytes_total",
            "Bytes of the frames that the hub's taps accepted.",
            |w| w.tap.bytes,
        );
        let help = "Frames of more than one segment that the hub's taps accepted.";
        self.one(out, "xdp_imds_sent_long_frames_total", help, |w| w.tap.long);
        let help = "Frames that the hub's taps refused, by reason.";
        self.lost(out, "xdp_imds_send_lost_frames_total", help, |hub| {
            let w = &hub.worker;
            [
                ("full", w.tap.full),
                ("no_memory", w.tap.no_memory),
                ("down", w.tap.down),
                ("bad_length", w.tap.bad_length),
                ("other", w.tap.other),
            ]
        });
        let help = "Frames that the kernel dropped behind the hub's tap: by a verdict hub_drop_*, or because the port's device is \
                    down, has a smaller MTU or accepts no redirected frames.";
        let dropped = self.each().map(|(number, hub)| ([("hub", number)], hub.losses.tap_dropped));
        out.family("xdp_imds_hub_dropped_frames_total", help, MetricType::Counter, dropped);
    }

    pub(super) fn turns(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_worker_turns_total", "Turns of the worker's loop.", |w| w.turns.turns);
        let help = "Turns that ended at their limit with work left.";
        self.one(out, "xdp_imds_worker_full_batches_total", help, |w| w.turns.full_batches);
        self.one(out, "xdp_imds_worker_sleeps_total", "Times the worker slept.", |w| w.turns.sleeps);
        self.one(
            out,
            "xdp_imds_worker_naps_total",
            "Short pauses of a busy worker, in which frames gather.",
            |w| w.turns.naps,
        );
        let help = "Slots whose state the worker dropped because their identity departed.";
        self.one(out, "xdp_imds_worker_forgotten_total", help, |w| w.turns.forgotten);
        let help = "Notifications that made the worker check a VM's waiting requests again.";
        self.one(out, "xdp_imds_worker_woken_total", help, |w| w.turns.woken);
        let of = |time: fn(&WorkerStats<T>) -> Duration| {
            self.each().map(move |(number, hub)| ([("hub", number)], Seconds(time(&hub.worker))))
        };
        let (name, help) = ("xdp_imds_worker_seconds_total", "Time since the worker started.");
        out.family(name, help, MetricType::Counter, of(|w| w.turns.elapsed));
        let (name, help) =
            ("xdp_imds_worker_slept_seconds_total", "Time that the worker has slept since it started.");
        out.family(name, help, MetricType::Counter, of(|w| w.turns.slept));
    }

    /// Adds the stack's counters and gauges. The first hub determines the names. A hub without one of these names
    /// has no sample for it.
    pub(super) fn engine(&self, out: &mut Exposition) {
        let Some(first) = self.hubs.first() else { return };
        for (names, kind) in [(first.counters, MetricType::Counter), (first.gauges, MetricType::Gauge)] {
            for (name, _) in names {
                let samples = self.each().filter_map(|(number, hub)| {
                    let all = if kind == MetricType::Counter { hub.counters } else { hub.gauges };
                    let (_, value) = all.iter().find(|(other, _)| other == name)?;
                    Some(([("hub", number)], *value))
                });
                let suffix = if kind == MetricType::Counter { "_total" } else { "" };
                let help = format!("The TCP stack's count of {}.", name.replace('_', " "));
                out.family(&format!("xdp_imds_stack_{name}{suffix}"), &help, kind, samples);
            }
        }
    }
}

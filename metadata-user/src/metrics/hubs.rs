//! Metrics of each hub and its worker: frames, turns, and the counters of its engine.

use std::time::Duration;

use super::Hub;
use super::exposition::{Exposition, Kind, Seconds};
use metadata_datapath::worker::WorkerStats;

/// The hubs of a snapshot, with their numbers as text.
pub(super) struct Hubs<'a, T> {
    pub(super) hubs: &'a [Hub<'a, T>],
    pub(super) numbers: &'a [String],
}

impl<'a, T> Hubs<'a, T> {
    fn each(&self) -> impl Iterator<Item = (&'a str, &'a Hub<'a, T>)> {
        self.numbers.iter().map(String::as_str).zip(self.hubs)
    }

    /// Adds a counter with one value per hub.
    fn one(&self, out: &mut Exposition, name: &str, help: &str, of: fn(&WorkerStats<T>) -> u64) {
        let samples = self.each().map(|(number, hub)| ([("hub", number)], of(&hub.worker)));
        out.family(name, help, Kind::Counter, samples);
    }

    /// Adds a counter of lost frames, with one value per hub and reason.
    fn lost<const N: usize>(
        &self,
        out: &mut Exposition,
        name: &str,
        help: &str,
        of: fn(&Hub<'_, T>) -> [(&'static str, u64); N],
    ) {
        let samples = self.each().flat_map(|(number, hub)| {
            of(hub).map(|(reason, count)| ([("hub", number), ("reason", reason)], count))
        });
        out.family(name, help, Kind::Counter, samples);
    }

    pub(super) fn received(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_received_frames_total", "Frames received by the AF_XDP socket.", |w| {
            w.socket.frames
        });
        self.one(out, "xdp_imds_received_bytes_total", "Octets in those frames.", |w| w.socket.bytes);
        let help = "Frames from guests that were lost before the stack handled them, by reason. \
                    over_share: frames of VMs that send more than their share.";
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
        let help = "Addresses in the fill ring that the kernel rejected.";
        self.one(out, "xdp_imds_fill_ring_invalid_total", help, |w| w.socket.invalid_fill);
    }

    pub(super) fn sent(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_sent_frames_total", "Frames that the hub tap accepted.", |w| w.tap.frames);
        self.one(out, "xdp_imds_sent_bytes_total", "Octets in those frames.", |w| w.tap.bytes);
        let help = "Frames that the hub tap did not accept, by reason.";
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
        let help = "Frames that the kernel dropped at the hub tap: those with a verdict hub_drop_*, and those whose \
                    guest's device is down, has too small an MTU or accepts no redirected frames.";
        let dropped = self.each().map(|(number, hub)| ([("hub", number)], hub.losses.tap_dropped));
        out.family("xdp_imds_hub_dropped_frames_total", help, Kind::Counter, dropped);
    }

    pub(super) fn turns(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_worker_turns_total", "Turns of the worker's loop.", |w| w.turns.turns);
        let help = "Turns that left work for the next turn.";
        self.one(out, "xdp_imds_worker_full_batches_total", help, |w| w.turns.full_batches);
        self.one(out, "xdp_imds_worker_sleeps_total", "Times the worker slept in poll.", |w| w.turns.sleeps);
        self.one(
            out,
            "xdp_imds_worker_naps_total",
            "Times the worker paused briefly so that frames could gather.",
            |w| w.turns.naps,
        );
        let help = "Slots whose connections the worker dropped on request of the control loop.";
        self.one(out, "xdp_imds_worker_forgotten_total", help, |w| w.turns.forgotten);
        let help = "Slots whose waiting requests the worker tried again on request of the control loop.";
        self.one(out, "xdp_imds_worker_woken_total", help, |w| w.turns.woken);
        let of = |time: fn(&WorkerStats<T>) -> Duration| {
            self.each().map(move |(number, hub)| ([("hub", number)], Seconds(time(&hub.worker))))
        };
        let (name, help) = ("xdp_imds_worker_seconds_total", "Time since the worker started.");
        out.family(name, help, Kind::Counter, of(|w| w.turns.elapsed));
        let (name, help) =
            ("xdp_imds_worker_slept_seconds_total", "Time that the worker spent asleep since it started.");
        out.family(name, help, Kind::Counter, of(|w| w.turns.slept));
    }

    /// Adds the engine's counters and gauges under the first hub's names. A hub that lacks one of them
    /// gets no sample of it.
    pub(super) fn engine(&self, out: &mut Exposition) {
        let Some(first) = self.hubs.first() else { return };
        for (names, kind) in [(first.counters, Kind::Counter), (first.gauges, Kind::Gauge)] {
            for (name, _) in names {
                let samples = self.each().filter_map(|(number, hub)| {
                    let all = if kind == Kind::Counter { hub.counters } else { hub.gauges };
                    let (_, value) = all.iter().find(|(other, _)| other == name)?;
                    Some(([("hub", number)], *value))
                });
                let suffix = if kind == Kind::Counter { "_total" } else { "" };
                let help = format!("The stack's count of {}.", name.replace('_', " "));
                out.family(&format!("xdp_imds_stack_{name}{suffix}"), &help, kind, samples);
            }
        }
    }
}

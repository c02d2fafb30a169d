//! How a storm would spread over the cores of large machines, by a model of what was measured on small ones:
//! `cargo bench -p xdp-imds-tests --bench many_cores`.
//!
//! Real guests spend milliseconds of their own CPU on each request. The model's instant guests spend next to nothing,
//! as the load generator of `cargo xtask storm` does: they ask as fast as any machine could.

use std::time::Duration;

use metadata_datapath::afxdp::{Queues, SocketConfig};
use metadata_steer::HUB_QUEUES;
use support::cores::Storm;

/// VMs on each core: 4,000 on 64.
const VMS_PER_CORE: f64 = 62.5;
/// CPU time of a request in a worker that serves 2,000 VMs, measured with `cargo xtask storm`, rounded up.
const WORKER: Duration = Duration::from_micros(8);
/// Host CPU of a request outside the worker, and the load generator's own, measured there.
const INSTANT: Duration = Duration::from_micros(20);
/// CPU time of a request in a guest that runs cloud-init (Python's `requests`), about.
const CLOUD_INIT: Duration = Duration::from_millis(2);

/// Frames that a queue of a hub with all queues holds.
fn places() -> usize {
    let config = SocketConfig::default();
    (Queues::memory(HUB_QUEUES, &config) / u64::from(config.chunk_size) / u64::from(HUB_QUEUES)) as usize
}

fn main() {
    let places = places();
    println!(
        "cores  VMs    guests      requests  workers  99 % of boots within  load of a worker  waiting in a queue"
    );
    for cores in [16, 32, 64, 128] {
        let vms = (cores as f64 * VMS_PER_CORE) as usize;
        for (guests, guest, requests) in
            [("instant", INSTANT, 4), ("instant", INSTANT, 46), ("cloud-init", CLOUD_INIT, 46)]
        {
            for workers in [1, 2, 4, 8] {
                let queues = HUB_QUEUES as usize;
                let storm = Storm { cores, workers, vms, requests, guest, worker: WORKER, queues, places };
                let course = storm.run();
                assert_eq!(course.boots.len(), vms);
                println!(
                    "{cores:5}  {vms:5}  {guests:10}  {requests:8}  {workers:7}  {:17.0} ms  {:14.0} %  {:8} of {places}",
                    course.within(0.99).as_secs_f64() * 1e3,
                    course.load * 100.0,
                    course.most_waiting,
                );
                assert_eq!(course.lost, 0, "no frame of a storm is lost");
            }
        }
    }
}

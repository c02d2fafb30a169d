//! The modest tenant: its new VMs, one after the other, and the time until each has its own data.

use super::node::{Node, from_secret};
use anyhow::{Context as _, Result, ensure};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use support::tap::Shape;
use support::tap_client::storm_until;

/// The namespace of the modest tenant.
pub(super) const NAMESPACE: &str = "modest";
/// The longest time until a new VM is served. A VM that is not served by then counts with this time, and as a failure.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The time of one attempt of the guest, as a client of a cloud has it. A guest that boots asks again at once.
const ATTEMPT: Duration = Duration::from_millis(250);
const PATH: &str = "/v1/user-data";

/// Runs a new VM, and returns the time from its VMI and pod to the first answer with its own data. Its pod is complete
/// before: the time that the lab takes to make devices does not count. Gives up once `stop` is true.
pub(super) fn serve_new_vm(node: &Node, stop: &AtomicBool) -> Result<Duration> {
    let pod = node.pod(NAMESPACE)?;
    let text = format!("#cloud-config\n# {}\n", pod.uid);
    pod.user_data(text.as_bytes())?;
    let tap = pod.tap(Shape::default())?;
    let began = Instant::now();
    pod.put(pod.vmi(&from_secret()));
    let outcomes = storm_until(vec![(pod.identity.clone(), tap)], &[PATH], PATIENCE, ATTEMPT, stop);
    let took = began.elapsed();
    let key = pod.key();
    pod.end()?;
    let outcome = outcomes.into_iter().next().context("a storm of one guest has one outcome")?;
    let answers = outcome.answers.with_context(|| format!("{key} was not served within {PATIENCE:?}"))?;
    let answer = answers.first().context("no answer")?;
    let body = String::from_utf8_lossy(&answer.body);
    ensure!(answer.status == 200, "{key} got {}: {body}", answer.status);
    ensure!(body == text, "ISOLATION: {key} got data that is not its own: {body}");
    Ok(took)
}

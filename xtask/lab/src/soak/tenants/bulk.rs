//! Attacks by what a tenant writes into VMIs and Secrets, and by devices in the namespace of a pod.

use super::attack::Ground;
use super::node::{Node, Pod, from_secret};
use super::yaml;
use anyhow::Result;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Duration;
use support::netns::Namespace;
use support::tap::Shape;

/// Bytes of a large key of a Secret: as many as Kubernetes accepts.
const SECRET_BYTES: usize = 1 << 20;
/// The annotation that a patch changes.
const ANNOTATION: &str = "example.com/turn";

/// Pods of one tenant in one namespace, without devices.
struct Crowd<'a> {
    // Dropped before the namespace.
    pods: Vec<Pod<'a>>,
    _ns: Namespace,
}

impl<'a> Crowd<'a> {
    fn new(node: &'a Node, namespace: &str, count: usize) -> Result<Self> {
        let ns = Namespace::new("crowd")?;
        let pods = (0..count).map(|_| node.bare_pod(namespace, &ns)).collect::<Result<_>>()?;
        Ok(Self { pods, _ns: ns })
    }

    fn end(self) -> Result<()> {
        self.pods.into_iter().try_for_each(Pod::end)
    }
}

/// Puts VMIs that all have these fields of `spec`, waits, and deletes them; again and again.
fn repeat(
    ground: &Ground<'_>,
    namespace: &str,
    (count, hold, pause): (usize, Duration, Duration),
    prepare: impl Fn(&Pod<'_>) -> Result<Value>,
) -> Result<()> {
    let crowd = Crowd::new(ground.node, namespace, count)?;
    let vmis = crowd.pods.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    ground.wait_for_start();
    while !ground.is_over() {
        for (pod, vmi) in crowd.pods.iter().zip(&vmis) {
            pod.put(vmi.clone());
            ground.act();
        }
        ground.sleep(hold);
        for pod in &crowd.pods {
            ground.node.server.delete(&pod.key());
        }
        ground.sleep(pause);
    }
    crowd.end()
}

/// The fields of `spec` with a network document in the VMI itself.
pub(super) fn with_network(text: &str) -> Value {
    json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": "#cloud-config\n", "networkData": text}}]})
}

pub(super) fn yaml_bomb(ground: &Ground<'_>) -> Result<()> {
    let times = (1, Duration::from_secs(8), Duration::from_secs(2));
    repeat(ground, "bombs", times, |pod| Ok(pod.vmi(&with_network(&yaml::bomb(yaml::LARGE)))))
}

/// Writes Secrets of short lines as a pod's access credentials, and returns the fields of `spec` that name them.
fn with_keys(pod: &Pod<'_>, count: usize) -> Result<Value> {
    // A line of one character costs the agent most for each byte.
    let lines = b"a\n".repeat(SECRET_BYTES / 2);
    let mut credentials = Vec::new();
    for number in 0..count {
        let secret = format!("keys{number}");
        pod.secret(&format!("{secret}-access-cred"), &[("key", &lines)])?;
        credentials.push(json!({"sshPublicKey": {
            "source": {"secret": {"secretName": secret}}, "propagationMethod": {"noCloud": {}},
        }}));
    }
    let mut spec = json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": "#cloud-config\n"}}]});
    spec["accessCredentials"] = credentials.into();
    Ok(spec)
}

pub(super) fn ssh_keys(ground: &Ground<'_>) -> Result<()> {
    let times = (1, ground.hold(), Duration::from_secs(2));
    repeat(ground, "keys", times, |pod| Ok(pod.vmi(&with_keys(pod, 12)?)))
}

pub(super) fn patch_slowly(ground: &Ground<'_>) -> Result<()> {
    patch(ground, "patches", Duration::from_millis(1_500))
}

pub(super) fn patch_fast(ground: &Ground<'_>) -> Result<()> {
    // An API server limits a client to some dozens of writes a second.
    patch(ground, "flood", Duration::from_millis(25))
}

/// Changes one VMI with two large Secrets, with a pause between changes.
fn patch(ground: &Ground<'_>, namespace: &str, pause: Duration) -> Result<()> {
    let crowd = Crowd::new(ground.node, namespace, 1)?;
    for pod in &crowd.pods {
        let mut vmi = pod.vmi(&with_keys(pod, 2)?);
        ground.wait_for_start();
        for turn in 0_u64.. {
            if ground.is_over() {
                break;
            }
            vmi["metadata"]["annotations"] = json!({ANNOTATION: turn.to_string()});
            pod.put(vmi.clone());
            ground.act();
            ground.sleep(pause);
        }
    }
    crowd.end()
}

pub(super) fn vmi_bytes(ground: &Ground<'_>) -> Result<()> {
    /// A little less than etcd accepts for an object.
    const BYTES: usize = 1_400 << 10;
    let times = (22, ground.hold(), Duration::from_secs(5));
    repeat(ground, "bulky", times, |pod| {
        let text = format!("#cloud-config\n# {}\n", "x".repeat(BYTES));
        Ok(pod.vmi(&json!({"volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": text}}]})))
    })
}

pub(super) fn record_memory(ground: &Ground<'_>) -> Result<()> {
    let times = (80, ground.hold(), Duration::from_secs(5));
    repeat(ground, "greedy", times, |pod| {
        let mut text = format!("#cloud-config\n# {}\n", pod.uid);
        while text.len() < SECRET_BYTES {
            text += "# 0123456789 0123456789 0123456789 0123456789 0123456789\n";
        }
        text.truncate(SECRET_BYTES);
        pod.user_data(text.as_bytes())?;
        Ok(pod.vmi(&from_secret()))
    })
}

pub(super) fn taps(ground: &Ground<'_>) -> Result<()> {
    const TAPS: usize = 1_500;
    /// Taps of one batch. Each batch holds the kernel's lock of all network devices, and the modest tenant's devices need
    /// that lock, too: whoever makes taps for tenants makes them one after the other.
    const BATCH: usize = 20;
    const PAUSE: Duration = Duration::from_millis(200);
    while !ground.is_over() {
        let pod = ground.node.pod("taps")?;
        let tap = pod.tap(Shape::default())?;
        pod.put(pod.vmi(&json!({})));
        ground.wait_for_start();
        for first in (0..TAPS).step_by(BATCH) {
            if ground.is_over() {
                break;
            }
            let mut lines = String::new();
            for number in first..first + BATCH {
                writeln!(lines, "tuntap add name more{number} mode tap\nlink set more{number} up")?;
                ground.act();
            }
            pod.ns()?.ip_batch(&lines)?;
            ground.sleep(PAUSE);
        }
        ground.sleep(ground.hold());
        drop(tap);
        pod.end()?;
        ground.sleep(Duration::from_secs(5));
    }
    Ok(())
}

pub(super) fn events(ground: &Ground<'_>) -> Result<()> {
    let crowd = Crowd::new(ground.node, "complaints", 60)?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        for pod in &crowd.pods {
            if ground.is_over() {
                return crowd.end();
            }
            // The volume of this Secret does not exist, and has another name each time.
            let mut vmi = pod.vmi(&from_secret());
            vmi["spec"]["volumes"][0]["name"] = format!("absent{turn}").into();
            pod.put(vmi);
            ground.act();
            ground.sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

pub(super) fn refused(ground: &Ground<'_>) -> Result<()> {
    const PODS: usize = 150;
    let crowd = Crowd::new(ground.node, "refused", PODS)?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        for pod in &crowd.pods {
            if ground.is_over() {
                break;
            }
            // Each turn it is a VMI of another name, as after a controller's retry.
            let mut vmi = pod.vmi(&with_network("{"));
            vmi["metadata"]["name"] = format!("{}-{turn}", pod.identity.hostname).into();
            pod.put(vmi);
            ground.act();
            ground.sleep(Duration::from_millis(50));
        }
        for pod in &crowd.pods {
            ground.node.server.delete(&format!("{}-{turn}", pod.key()));
        }
        if ground.is_over() {
            break;
        }
    }
    crowd.end()
}

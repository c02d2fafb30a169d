//! A pod's network with the bridges, taps and dummies that KubeVirt creates (its `pkg/network/setup/netpod`).

use anyhow::{Context as _, Result};
use metadata_common::mac::Mac;
use metadata_feed::pods::NicNames;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::netns::{self, Namespace};
use crate::tap::{Shape, Tap};

/// How a guest's NIC is connected to the pod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// A bridge that has the guest's gateway address and KubeVirt's fixed MAC. The pod NIC does not change.
    Masquerade,
    /// The pod NIC is renamed and added to the bridge; a dummy takes its name and MAC.
    Bridge,
}

/// A pod's namespace, connected by veth pairs to the node's namespace.
#[derive(Debug)]
pub struct PodNetwork<'a> {
    ns: Namespace,
    node: &'a Namespace,
}

impl<'a> PodNetwork<'a> {
    /// A namespace without a NIC.
    ///
    /// # Errors
    /// As for [`Namespace::new`].
    pub fn new(node: &'a Namespace) -> Result<Self> {
        Ok(Self { ns: Namespace::new("pod")?, node })
    }

    /// The pod's namespace.
    #[must_use]
    pub fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// Adds a pod NIC, like a CNI plugin. Returns the name of the node's end.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn add_nic(&self, names: &NicNames, mac: Mac) -> Result<String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let outer = format!("veth{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let NicNames { pod, .. } = names;
        let inside = self.ns.name();
        self.node.ip(&format!("link add {outer} type veth peer name {pod} netns {inside}"))?;
        self.ns.ip_batch(&format!("link set {pod} address {mac}\nlink set {pod} up\n"))?;
        self.node.ip(&format!("link set {outer} up"))?;
        Ok(outer)
    }

    /// Connects a guest's NIC to a pod NIC: creates the bridge and the tap, and returns the tap.
    ///
    /// # Errors
    /// When there is no such pod NIC, or a name is taken.
    pub fn bind(&self, names: &NicNames, binding: Binding, shape: Shape) -> Result<Arc<Tap>> {
        let NicNames { pod, tap, bridge } = names;
        match binding {
            Binding::Masquerade => self.ns.ip_batch(&format!(
                "link add {bridge} address 02:00:00:00:00:00 type bridge\n\
                 addr add 10.0.2.1/24 dev {bridge}\n\
                 link set {bridge} up\n"
            ))?,
            Binding::Bridge => {
                let mac = self.mac(pod)?;
                // A hashed name has the prefix `pod`. The new name omits it, because it would be too long.
                let moved = format!("{}-nic", pod.strip_prefix("pod").unwrap_or(pod));
                self.ns.ip_batch(&format!(
                    "link set {pod} down\n\
                     link set {pod} name {moved}\n\
                     link add {bridge} type bridge\n\
                     link set {moved} master {bridge}\n\
                     link set {moved} up\n\
                     link set {moved} type bridge_slave learning off\n\
                     addr add 169.254.75.10/32 dev {bridge}\n\
                     link set {bridge} up\n"
                ))?;
                let stand_in = |kind| self.ns.ip(&format!("link add {pod} address {mac} type {kind}"));
                // The kernel may lack dummies. Only the name and the MAC matter.
                stand_in("dummy").or_else(|_| stand_in("bridge"))?;
            }
        }
        let made = Tap::create(&self.ns, tap, shape)?;
        self.ns.ip(&format!("link set {tap} master {bridge} up"))?;
        Ok(Arc::new(made))
    }

    /// The MAC of a device.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn mac(&self, device: &str) -> Result<Mac> {
        let shown = self.ns.ip(&format!("-o link show {device}"))?;
        let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
        Ok(mac.context("a device without a MAC")?.parse()?)
    }

    /// Removes the name of the namespace, which then ends with the last process in it.
    ///
    /// # Errors
    /// As for [`Namespace::remove`].
    pub fn leave_to_its_processes(self) -> Result<()> {
        self.ns.remove()
    }
}

/// Whether a device exists in a namespace.
#[must_use]
pub fn is_there(ns: &Namespace, device: &str) -> bool {
    ns.run_in(|| netns::run(std::process::Command::new("ip").args(["link", "show", device]))).is_ok()
}

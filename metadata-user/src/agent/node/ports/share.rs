//! How tenants share the ports of a node.

use std::collections::HashMap;

use metadata_base::port::PortName;
use metadata_base::share::{FairShare, ShareError, Tenant};
use metadata_common::maps::MAX_PORTS;

/// Ports that each tenant may have while the node's limit is not reached.
const FLOOR: usize = 64;

/// The tenant of each attached port.
#[derive(Debug)]
pub(super) struct PortShares {
    share: FairShare,
    tenants: HashMap<PortName, Tenant>,
}

impl Default for PortShares {
    fn default() -> Self {
        Self { share: FairShare::new(MAX_PORTS as usize, FLOOR), tenants: HashMap::new() }
    }
}

impl PortShares {
    /// Counts a port that is about to be attached, unless it counts already.
    ///
    /// # Errors
    /// The tenant has its share.
    pub(super) fn admit(&mut self, port: &PortName, tenant: Tenant) -> Result<(), ShareError> {
        if !self.tenants.contains_key(port) {
            self.share.admit(&tenant, 1)?;
            self.tenants.insert(port.clone(), tenant);
        }
        Ok(())
    }

    /// Counts a port no more.
    pub(super) fn release(&mut self, port: &PortName) {
        if let Some(tenant) = self.tenants.remove(port) {
            self.share.release(&tenant, 1);
        }
    }

    /// Counts no port for which `is_attached` is false: a device that was renamed or deleted is detached elsewhere.
    pub(super) fn retain(&mut self, is_attached: impl Fn(&PortName) -> bool) {
        let share = &mut self.share;
        self.tenants.retain(|port, tenant| {
            let keep = is_attached(port);
            if !keep {
                share.release(tenant, 1);
            }
            keep
        });
    }

    pub(super) fn share(&self) -> &FairShare {
        &self.share
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PORTS, PortName, PortShares, Tenant};

    #[test]
    fn a_namespace_that_takes_all_ports_it_gets_leaves_some_for_another() {
        let mut shares = PortShares::default();
        let (hostile, modest) = (Tenant::namespace("hostile"), Tenant::namespace("modest"));
        let port = |n: u32| PortName { ifname: format!("tap{n}"), netns: Some("/proc/42/ns/net".into()) };
        for _ in 0..2 {
            let admitted =
                (0..MAX_PORTS).filter(|n| shares.admit(&port(*n), hostile.clone()).is_ok()).count();
            assert_eq!(admitted, MAX_PORTS as usize / 2, "attached ports count once");
        }
        shares.admit(&port(MAX_PORTS), modest).expect("a port");
        (0..2).for_each(|n| shares.release(&port(n)));
        shares.admit(&port(MAX_PORTS + 1), hostile).expect("one is free again");
        shares.retain(|_| false);
        assert_eq!(shares.share().used(), 0);
    }
}

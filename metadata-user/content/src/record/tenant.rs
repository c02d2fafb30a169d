//! Whose share of the node's limits a VM uses.

use metadata_base::share::Tenant;

use super::Record;

impl Record {
    /// Whose share of the node's limits the VM's requests use: its namespace's, or else its own.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        match &self.vm.namespace {
            Some(namespace) => Tenant::namespace(namespace.as_str()),
            None => Tenant::Vm(self.owner_text().into()),
        }
    }
}

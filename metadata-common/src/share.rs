//! Fair shares of a limit of the node among tenants.
//!
//! A tenant is the owner that the platform assigned to a record; nothing that a tenant writes names it. Of each limit that
//! tenants can fill, a tenant holds at most half of what the others leave. One tenant alone can therefore hold half of
//! the limit, two a third each, and there is always something left for the next one. A tenant below the floor is
//! admitted while anything is left, and an eighth of the limit is kept for such tenants. The operator's own records are
//! bounded only by the limit.
//!
//! The rule looks only at what is held now, not at times or at the order of arrival, and takes nothing away from
//! anybody.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

/// The part of a limit that only tenants below the floor may use: one in this many.
pub const RESERVED_PART: usize = 8;
/// Most tenants that reports list, those that hold most.
pub const LISTED_TENANTS: usize = 10;

/// Whoever shares a limit with others, as the platform names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tenant {
    /// The operator, who writes files, the configuration, and to the API.
    Operator,
    /// A namespace of Kubernetes.
    Namespace(Arc<str>),
    /// One VM, where no larger unit is known.
    Vm(Arc<str>),
}

impl Tenant {
    /// A namespace of Kubernetes.
    #[must_use]
    pub fn namespace(name: &str) -> Self {
        Self::Namespace(name.into())
    }
}

/// The tenant's name in reports, messages and labels of metrics.
impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator => f.write_str("operator"),
            Self::Namespace(name) => write!(f, "namespace/{name}"),
            Self::Vm(name) => write!(f, "vm/{name}"),
        }
    }
}

/// A tenant would hold more than its share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareError {
    /// The tenant.
    pub tenant: Tenant,
    /// What it asked for.
    pub wants: usize,
    /// What it holds.
    pub held: usize,
    /// What it may hold now.
    pub share: usize,
    /// What all tenants hold.
    pub used: usize,
    /// What all tenants may hold.
    pub limit: usize,
}

impl fmt::Display for ShareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tenant, wants, held, share, used, limit } = self;
        write!(
            f,
            "{tenant} holds {held} and asks for {wants} more, but its share is {share} now: half of what others leave of \
             {limit}, of which {used} are taken"
        )
    }
}

impl std::error::Error for ShareError {}

/// A limit that tenants share, and what each of them holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FairShare {
    limit: usize,
    floor: usize,
    used: usize,
    held: BTreeMap<Tenant, usize>,
    refusals: u64,
}

impl FairShare {
    /// Shares `limit`. A tenant that holds at most `floor` is admitted while anything is left.
    #[must_use]
    pub fn new(limit: usize, floor: usize) -> Self {
        Self { limit, floor, ..Self::default() }
    }

    /// Changes the limit and the floor. Nobody loses what it holds.
    pub fn set_limit(&mut self, limit: usize, floor: usize) {
        (self.limit, self.floor) = (limit, floor);
    }

    /// Gives `size` more to a tenant.
    ///
    /// # Errors
    /// [`ShareError`]: the tenant would hold more than its share, and nothing changes.
    pub fn admit(&mut self, tenant: &Tenant, size: usize) -> Result<(), ShareError> {
        self.replace(tenant, 0, size)
    }

    /// Gives `size` to a tenant in place of `former`, which it holds. Something smaller is always admitted.
    ///
    /// # Errors
    /// [`ShareError`]: the tenant would hold more than its share, and it keeps `former`.
    pub fn replace(&mut self, tenant: &Tenant, former: usize, size: usize) -> Result<(), ShareError> {
        let wants = size.saturating_sub(former);
        if wants > self.free_for(tenant) {
            return Err(self.refuse(tenant, wants));
        }
        self.release(tenant, former);
        self.charge(tenant, size);
        Ok(())
    }

    /// Counts a refusal, and describes it.
    pub fn refuse(&mut self, tenant: &Tenant, wants: usize) -> ShareError {
        self.refusals += 1;
        let held = self.held(tenant);
        let share = held.saturating_add(self.free_for(tenant));
        ShareError { tenant: tenant.clone(), wants, held, share, used: self.used, limit: self.limit }
    }

    /// Gives `size` to a tenant without asking, for what cannot be refused any more.
    pub fn charge(&mut self, tenant: &Tenant, size: usize) {
        if size > 0 {
            let held = self.held.entry(tenant.clone()).or_default();
            *held = held.saturating_add(size);
            self.used = self.used.saturating_add(size);
        }
    }

    /// Takes `size` back from a tenant, or all that it holds if that is less.
    pub fn release(&mut self, tenant: &Tenant, size: usize) {
        let Some(held) = self.held.get_mut(tenant) else { return };
        let size = size.min(*held);
        *held -= size;
        self.used -= size;
        if *held == 0 {
            self.held.remove(tenant);
        }
    }

    /// The most that a tenant is given now on top of what it holds.
    #[must_use]
    pub fn free_for(&self, tenant: &Tenant) -> usize {
        let free = self.limit.saturating_sub(self.used);
        if *tenant == Tenant::Operator {
            return free;
        }
        let held = self.held(tenant);
        let below_floor = self.floor.saturating_sub(held).min(free);
        let half = (self.limit.saturating_sub(self.used - held) / 2).saturating_sub(held);
        let unreserved = free.saturating_sub((self.limit / RESERVED_PART).max(self.floor));
        below_floor.max(half.min(unreserved))
    }

    /// What a tenant holds.
    #[must_use]
    pub fn held(&self, tenant: &Tenant) -> usize {
        self.held.get(tenant).copied().unwrap_or_default()
    }

    /// What all tenants hold.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// What all tenants may hold.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Refusals since the start.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// The tenants that hold most, at most [`LISTED_TENANTS`], and what each holds.
    #[must_use]
    pub fn top(&self) -> Vec<(Tenant, usize)> {
        let mut all: Vec<_> = self.held.iter().map(|(tenant, held)| (tenant, *held)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        all.into_iter().take(LISTED_TENANTS).map(|(tenant, held)| (tenant.clone(), held)).collect()
    }
}

/// Who holds how much of a limit, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareReport {
    /// The limit's name in reports and metrics.
    pub limit: &'static str,
    /// What all tenants hold.
    pub used: usize,
    /// What all tenants may hold.
    pub most: usize,
    /// Refusals since the start.
    pub refusals: u64,
    /// The tenants that hold most; see [`FairShare::top`].
    pub top: Vec<(Tenant, usize)>,
}

impl ShareReport {
    /// The report on a limit.
    #[must_use]
    pub fn of(limit: &'static str, share: &FairShare) -> Self {
        let (used, most, refusals) = (share.used(), share.limit(), share.refusals());
        Self { limit, used, most, refusals, top: share.top() }
    }
}

/// A bounded queue in which tenants take turns, so that nobody waits for all that another has queued.
#[derive(Clone, Debug)]
pub struct FairQueue<T> {
    share: FairShare,
    waiting: BTreeMap<Tenant, VecDeque<T>>,
    /// Tenants with waiting items, in the order of their turns.
    turns: VecDeque<Tenant>,
}

impl<T> FairQueue<T> {
    /// An empty queue for `limit` items, with a floor of `floor` items; see [`FairShare::new`].
    #[must_use]
    pub fn new(limit: usize, floor: usize) -> Self {
        Self { share: FairShare::new(limit, floor), waiting: BTreeMap::new(), turns: VecDeque::new() }
    }

    /// Adds an item behind those of its tenant.
    ///
    /// # Errors
    /// [`ShareError`]: the tenant has its share of the queue, and the item is dropped.
    pub fn push(&mut self, tenant: &Tenant, item: T) -> Result<(), ShareError> {
        self.share.admit(tenant, 1)?;
        let waiting = self.waiting.entry(tenant.clone()).or_default();
        if waiting.is_empty() {
            self.turns.push_back(tenant.clone());
        }
        waiting.push_back(item);
        Ok(())
    }

    /// Takes the first item of the tenant whose turn it is.
    pub fn pop(&mut self) -> Option<(Tenant, T)> {
        let tenant = self.turns.pop_front()?;
        let waiting = self.waiting.get_mut(&tenant)?;
        let item = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&tenant);
        } else {
            self.turns.push_back(tenant.clone());
        }
        self.share.release(&tenant, 1);
        Some((tenant, item))
    }

    /// The waiting items of a tenant, the next one first.
    pub fn of(&mut self, tenant: &Tenant) -> impl Iterator<Item = &mut T> {
        self.waiting.get_mut(tenant).into_iter().flatten()
    }

    /// Removes the items of a tenant for which `keep` is false.
    pub fn retain(&mut self, tenant: &Tenant, keep: impl FnMut(&T) -> bool) {
        let Some(waiting) = self.waiting.get_mut(tenant) else { return };
        let before = waiting.len();
        waiting.retain(keep);
        self.share.release(tenant, before - waiting.len());
        if waiting.is_empty() {
            self.waiting.remove(tenant);
            self.turns.retain(|other| other != tenant);
        }
    }

    /// Number of waiting items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.share.used()
    }

    /// True if no item waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// How tenants share the queue.
    #[must_use]
    pub fn share(&self) -> &FairShare {
        &self.share
    }
}

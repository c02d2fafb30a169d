//! What the configuration says of a node, changed while it serves.

use super::Node;
use tracing::warn;

use crate::config::Config;

impl Node {
    /// Takes over what can change of the configuration: ports of its own, limits, and the age of token keys.
    pub fn configure(&mut self, config: &Config) {
        let (plan, mut touched) = self.plan.reconfigured(&config.ports, &self.records);
        self.plan = plan;
        self.touched.append(&mut touched);
        if config.limits != self.steering.limits()
            && let Err(error) = self.steering.set_limits(config.limits)
        {
            warn!("not all ports have the new limits: {error}; the next reload tries again");
        }
        self.room.set_limit(config.record_octets());
        self.state.rotate_after(config.rotate_token_key_days);
        self.tell_conflicts();
    }

    /// The configuration was read again, or could not be.
    pub(in crate::agent) fn count_reload(&mut self, done: bool) {
        let count = if done { &mut self.reloads.done } else { &mut self.reloads.failed };
        *count += 1;
    }
}

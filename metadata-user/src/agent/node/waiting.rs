//! Clients that wait until the ports of their record are attached.

use metadata_control::instances::Instance;
use metadata_control::status::InstanceState;
use metadata_feed::registry::RecordId;
use tokio::sync::oneshot;

/// The reply channels of waiting clients, each with its record. The caller of `push` limits the number of clients.
#[derive(Debug, Default)]
pub(super) struct Waiting(Vec<(RecordId, oneshot::Sender<Instance>)>);

impl Waiting {
    /// Adds a client.
    pub(super) fn push(&mut self, id: RecordId, reply: oneshot::Sender<Instance>) {
        self.0.retain(|(_, reply)| !reply.is_closed());
        self.0.push((id, reply));
    }

    /// Drops the clients of a record.
    pub(super) fn forget(&mut self, id: &RecordId) {
        self.0.retain(|(waits, _)| waits != id);
    }

    /// Replies to clients whose record is served. Drops clients that disconnected or whose record was removed.
    pub(super) fn notify(&mut self, instance: impl Fn(&RecordId) -> Option<Instance>) {
        for (id, reply) in std::mem::take(&mut self.0) {
            match instance(&id) {
                Some(instance) if instance.state == InstanceState::Served => _ = reply.send(instance),
                Some(_) if !reply.is_closed() => self.0.push((id, reply)),
                Some(_) | None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Waiting;
    use metadata_content::source::Source;
    use metadata_control::instances::Instance;
    use metadata_control::status::InstanceState;
    use metadata_feed::registry::RecordId;
    use tokio::sync::oneshot;

    fn instance(id: &RecordId, state: InstanceState) -> Instance {
        Instance {
            name: id.key.as_ref().into(),
            source: id.source,
            state,
            in_force: true,
            shadowed_by: None,
            refused: None,
            etag: None,
            generation: None,
            vm: None,
            ports: Vec::new(),
            change: None,
            record: None,
            withheld: None,
        }
    }

    #[test]
    fn a_client_gets_a_reply_once_its_record_is_served_and_none_if_it_is_removed() {
        let (mut waiting, id) = (Waiting::default(), RecordId::new(Source::Api, "web"));
        let (reply, mut answer) = oneshot::channel();
        waiting.push(id.clone(), reply);
        waiting.notify(|id| Some(instance(id, InstanceState::Waiting)));
        assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        waiting.notify(|id| Some(instance(id, InstanceState::Served)));
        assert!(answer.try_recv().is_ok());
        for drops in [|waiting: &mut Waiting, _: &RecordId| waiting.notify(|_| None), Waiting::forget] {
            let (reply, mut answer) = oneshot::channel();
            waiting.push(id.clone(), reply);
            drops(&mut waiting, &id);
            assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        }
    }
}

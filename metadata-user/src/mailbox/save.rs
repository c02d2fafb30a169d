//! Writing to disk what a VM wrote, off the packet path.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::locked;
use super::state::State;
use metadata_state::private_file;

/// Changes are gathered for this long, so that a guest cannot have its file written more often.
const SAVE_PAUSE: Duration = Duration::from_millis(250);
/// Most octets of a VM's file that are read: all attributes, documents and names, as base64.
pub(super) const FILE_OCTETS: u64 = 4 << 20;

/// What is kept of one VM, and where.
pub(super) struct Kept {
    vm: Box<str>,
    changing: Mutex<Changing>,
    /// True from a change until its save begins: a mailbox is in the queue once at most, so the queue is
    /// never longer than there are VMs.
    queued: AtomicBool,
    /// Locked while the file is written; none when it is not kept on disk, or no more.
    file: Mutex<Option<PathBuf>>,
    saver: Option<UnboundedSender<Arc<Kept>>>,
}

#[derive(Default)]
struct Changing {
    state: State,
    /// Grows with each change.
    revision: u64,
    /// The revision on disk.
    saved: u64,
}

impl Kept {
    pub(super) fn in_memory(vm: &str) -> Self {
        Self::new(vm, State::default(), None, None)
    }

    pub(super) fn new(
        vm: &str,
        state: State,
        file: Option<PathBuf>,
        saver: Option<UnboundedSender<Arc<Self>>>,
    ) -> Self {
        let changing = Mutex::new(Changing { state, ..Changing::default() });
        Self { vm: vm.into(), changing, queued: AtomicBool::new(false), file: Mutex::new(file), saver }
    }

    pub(super) fn vm(&self) -> &str {
        &self.vm
    }

    pub(super) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&locked(&self.changing).state)
    }

    pub(super) fn change(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let changed: Result<(), std::convert::Infallible> = self.try_change(|state| {
            change(state);
            Ok(true)
        });
        match changed {
            Ok(()) => {}
        }
    }

    /// `change` says whether it changed something.
    pub(super) fn try_change<E>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut State) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut changing = locked(&self.changing);
        if !change(&mut changing.state)? {
            return Ok(());
        }
        changing.revision += 1;
        drop(changing);
        if let Some(saver) = self.saver.as_ref().filter(|_| !self.queued.swap(true, Ordering::AcqRel)) {
            // Nobody saves any more: the agent is ending, and saves what is left by itself.
            let _ = saver.send(Arc::clone(self));
        }
        Ok(())
    }

    /// Takes what the file says, which another agent wrote, in the place of what was here.
    pub(super) fn replace(&self, state: State) {
        let mut changing = locked(&self.changing);
        changing.state = state;
        changing.saved = changing.revision;
    }

    /// Writes the file, if there is one and it is behind.
    pub(super) fn save(&self) -> io::Result<()> {
        self.queued.store(false, Ordering::Release);
        let file = locked(&self.file);
        let Some(path) = file.as_deref() else { return Ok(()) };
        // A copy shares the octets: a guest that writes meanwhile does not wait for their text form.
        let (state, revision) = {
            let changing = locked(&self.changing);
            if changing.revision == changing.saved {
                return Ok(());
            }
            (changing.state.clone(), changing.revision)
        };
        let text = serde_json::to_vec(&state)?;
        private_file::replace(path, &text)?;
        locked(&self.changing).saved = revision;
        Ok(())
    }

    /// Waits for a save under way; there is none after it.
    pub(super) fn detach(&self) {
        *locked(&self.file) = None;
    }
}

/// What became of saves.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    pub(super) failed: AtomicU64,
    /// The last one failed, and was logged: guests cannot fill the log.
    failing: AtomicBool,
}

impl Outcomes {
    pub(super) fn save(&self, kept: &Kept) {
        match kept.save() {
            Ok(()) => self.failing.store(false, Ordering::Relaxed),
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                if !self.failing.swap(true, Ordering::Relaxed) {
                    let vm = kept.vm();
                    tracing::warn!(vm, %error, "what VMs write is not on disk; check the state directory");
                }
            }
        }
    }
}

/// Mailboxes to save. For [`save()`].
#[derive(Debug)]
pub struct Saves {
    pub(super) queue: UnboundedReceiver<Arc<Kept>>,
    pub(super) outcomes: Arc<Outcomes>,
}

/// Saves changed mailboxes, one after the other, until their [`super::Mailboxes`] is gone.
///
/// What cannot be written is counted, and tried again with that VM's next change.
pub async fn save(mut saves: Saves) {
    while let Some(first) = saves.queue.recv().await {
        tokio::time::sleep(SAVE_PAUSE).await;
        let mut batch = vec![first];
        while let Ok(next) = saves.queue.try_recv() {
            batch.push(next);
        }
        let outcomes = Arc::clone(&saves.outcomes);
        // The task ends early only with the runtime, and the agent saves what is left by itself.
        let _ = tokio::task::spawn_blocking(move || batch.iter().for_each(|kept| outcomes.save(kept))).await;
    }
}

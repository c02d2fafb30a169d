//! What outlives the agent of one VM's mailbox, and whether it is on disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::locked;
use super::state::State;

/// Takes a mailbox that has changed, to have it saved soon. Called by whoever serves guests: it must not wait.
pub type Saver = Box<dyn Fn(Arc<Kept>) + Send + Sync>;

/// What is kept of one VM, and where.
pub struct Kept {
    vm: Box<str>,
    changing: Mutex<Changing>,
    /// True from a change until its save begins: a mailbox is in the queue once at most, so the queue is
    /// never longer than there are VMs.
    queued: AtomicBool,
    /// Locked while the file is written; none when it is not kept on disk, or no more.
    file: Mutex<Option<PathBuf>>,
    saver: Option<Saver>,
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
    /// Nothing yet of the VM with this UUID, and no file.
    #[must_use]
    pub fn in_memory(vm: &str) -> Self {
        Self::new(vm, State::default(), None, None)
    }

    /// What is kept of the VM with this UUID, the file for it, and who has it saved.
    #[must_use]
    pub fn new(vm: &str, state: State, file: Option<PathBuf>, saver: Option<Saver>) -> Self {
        let changing = Mutex::new(Changing { state, ..Changing::default() });
        Self { vm: vm.into(), changing, queued: AtomicBool::new(false), file: Mutex::new(file), saver }
    }

    /// The VM's UUID.
    #[must_use]
    pub fn vm(&self) -> &str {
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
            saver(Arc::clone(self));
        }
        Ok(())
    }

    /// Takes what the file says, which another agent wrote, in the place of what was here.
    pub(super) fn replace(&self, state: State) {
        let mut changing = locked(&self.changing);
        changing.state = state;
        changing.saved = changing.revision;
    }

    /// Has `write` put the file's new text in its place, if there is a file and it is behind.
    ///
    /// # Errors
    /// What `write` failed with; the file counts as behind then.
    pub fn save(&self, write: impl FnOnce(&Path, &[u8]) -> io::Result<()>) -> io::Result<()> {
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
        write(path, &text)?;
        locked(&self.changing).saved = revision;
        Ok(())
    }

    /// Waits for a save under way; there is none after it.
    pub fn detach(&self) {
        *locked(&self.file) = None;
    }
}

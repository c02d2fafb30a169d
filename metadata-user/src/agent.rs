//! The control side: joins feed, store and steer.

"""Runs on several hosts: an agent on each host, reached through ssh or Ray, and the fleet that controls them.

May import supervision and the pure packages of toolkit; Ray only in the ray_ modules.
"""
